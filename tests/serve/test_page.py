"""The page in a real browser."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from helpers.browser import BROWSER, FLAGS
from helpers.color_classifier import COLORS, color_checkpoint
from helpers.model_zoo import RESNETS, make_checkpoint
from helpers.serving import Server, serving
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.models import build_model

pytest.importorskip("playwright", reason="needs playwright")
from playwright.sync_api import Browser, Page, sync_playwright

if BROWSER is None:
    pytest.skip("needs a Chromium on the PATH (Debian: apt install chromium)", allow_module_level=True)


def attending_checkpoint() -> Checkpoint:
    """A color classifier like `color_checkpoint`, with two blocks that change little but have attention."""
    config = ViTConfig(
        image_size=32, patch_size=8, embed_dim=8, depth=2, num_heads=2, mlp_dim=8, num_classes=3,
        class_token=False, pooling="average", post_norm=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.3 if name.startswith("blocks") and parameter.ndim == 2 else 1.0)
        model.patch_embed.proj.weight.zero_()
        for channel in range(3):
            model.patch_embed.proj.weight[channel, channel * 64 : (channel + 1) * 64] = 1 / 16
            model.head.weight[channel, channel] = 3.0
    return Checkpoint(config, dict(model.state_dict()), Preprocess(size=(32, 32), mean=HALF, std=HALF), tuple(COLORS))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page") / "model"
    write_checkpoint(folder, attending_checkpoint())
    with serving(folder, "--num-threads", 1) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    yield from open_page(browser, server, {"width": 1280, "height": 800})


def open_page(browser: Browser, server: Server, size: dict[str, int], **options: Any) -> Iterator[Page]:
    """Open the page; it must log no errors and contact no other server."""
    context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(120_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if not is_own(request.url, server.url) else None)
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('about').textContent !== '…'")
    yield page
    context.close()
    assert [problem for problem in problems if "422" not in problem] == []  # browsers log rejected images, too


def is_problem(message: Any) -> bool:
    """Errors and warnings, except one about this test's own reading of the canvas."""
    return message.type in ("error", "warning") and "getImageData" not in message.text


def is_own(url: str, server: str) -> bool:
    return url.startswith((server, "blob:" + server, "data:"))


def image_file(color: str, size: tuple[int, int] = (120, 80)) -> dict[str, Any]:
    file = io.BytesIO()
    image = Image.new("RGB", size, color)
    image.paste("white", (0, 0, size[0] // 3, size[1] // 3))
    image.save(file, "PNG")
    return {"name": f"{color}.png", "mimeType": "image/png", "buffer": file.getvalue()}


def upload(page: Page, *files: dict[str, Any]) -> None:
    page.set_input_files("#files", list(files))  # type: ignore[arg-type]


def pixels(page: Page) -> list[int]:
    script = """() => { const c = document.getElementById("canvas"), n = c.width * c.height;
      const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      return Array.from({length: 400}, (_, i) => data[4 * Math.floor(i * n / 400)]); }"""
    return page.evaluate(script)


def wait_for_map(page: Page) -> None:
    page.wait_for_function("() => document.getElementById('canvas').getAttribute('aria-label').includes('brightest')")


@pytest.mark.slow
def test_uploaded_image_is_classified(page: Page) -> None:
    upload(page, image_file("red"))
    page.wait_for_selector("#scores button")
    first = page.locator("#scores button").first
    assert first.locator("span").text_content() == "red"
    assert "%" in (first.locator("b").text_content() or "")
    assert first.get_attribute("aria-pressed") == "true"
    assert "red" in (page.locator("#status").text_content() or "")


def test_dropped_image(page: Page) -> None:
    data = list(image_file("blue")["buffer"])
    script = """data => { const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(data)], "dropped.png", {type: "image/png"}));
      const event = new DragEvent("drop", {dataTransfer: transfer, bubbles: true});
      document.getElementById("drop").dispatchEvent(event); }"""
    page.evaluate(script, data)
    page.wait_for_selector("#scores button")
    assert page.locator("#scores button span").first.text_content() == "blue"


def test_pasted_image(page: Page) -> None:
    data = list(image_file("green")["buffer"])
    script = """data => { const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(data)], "", {type: "image/png"}));
      document.dispatchEvent(new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true})); }"""
    page.evaluate(script, data)
    page.wait_for_selector("#scores button")
    assert page.locator("#scores button span").first.text_content() == "green"


def test_opacity_and_class_change_the_map(page: Page) -> None:
    upload(page, image_file("red"))
    wait_for_map(page)
    shown = pixels(page)
    page.locator("#blend").fill("0")
    bare = pixels(page)
    assert bare != shown
    page.locator("#blend").fill("100")
    assert pixels(page) not in (bare, shown)
    page.check("#grid")
    lined = pixels(page)
    with page.expect_response("**/v1/explain*"):
        page.locator("#scores button").nth(1).click()
    wait_for_map(page)
    assert page.locator("#scores button").nth(1).get_attribute("aria-pressed") == "true"
    assert pixels(page) != lined
    with page.expect_response("**/v1/explain*rollout"):
        page.select_option("#method", "rollout")


def test_hovering_a_patch_shows_its_attention(page: Page) -> None:
    upload(page, image_file("red"))
    page.wait_for_selector("#scores button")
    with page.expect_response("**/v1/attention*"):
        page.check("input[value=attention]")
    wait_for_map(page)
    box = page.locator("#canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_selector("#spot:not([hidden])")
    first, where = pixels(page), page.locator("#spot").text_content()
    page.mouse.move(box["x"] + 0.72 * box["width"], box["y"] + 0.9 * box["height"])
    assert page.locator("#spot").text_content() != where
    assert pixels(page) != first
    page.mouse.move(5, 5)
    page.wait_for_selector("#spot", state="hidden")
    page.focus("#canvas")  # with the keyboard
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#spot:not([hidden])")
    start = page.locator("#spot").text_content()
    page.keyboard.press("ArrowRight")
    assert page.locator("#spot").text_content() != start
    page.keyboard.press("Escape")
    page.wait_for_selector("#spot", state="hidden")


def test_switching_between_images(page: Page) -> None:
    upload(page, image_file("red"), image_file("blue"))
    page.wait_for_selector("#scores button")
    assert page.locator("#history button").count() == 2
    page.locator("#history button").nth(1).click()
    page.wait_for_function(
        "() => document.querySelector('#scores span') && document.querySelector('#scores span').textContent === 'blue'"
    )
    page.locator("#history button").nth(0).click()
    page.wait_for_function(
        "() => document.querySelector('#scores span') && document.querySelector('#scores span').textContent === 'red'"
    )


def test_unreadable_file_shows_an_error(page: Page) -> None:
    upload(page, {"name": "letter.txt", "mimeType": "text/plain", "buffer": b"Dear Sir"})
    page.wait_for_selector("#status.error")
    assert "letter.txt" in (page.locator("#status").text_content() or "")
    upload(page, image_file("blue"))  # the page still works
    page.wait_for_selector("#scores button")
    assert not page.locator("#status.error").count()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_has_no_horizontal_scroll(browser: Browser, server: Server, scheme: Any) -> None:
    for page in open_page(browser, server, {"width": 360, "height": 700}, color_scheme=scheme, has_touch=True):
        for _ in range(2):
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0
            upload(page, image_file("red", (900, 300)), image_file("blue", (100, 900)))
            wait_for_map(page)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Browser, server: Server, scheme: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    for page in open_page(browser, server, {"width": 1280, "height": 800}, color_scheme=scheme, bypass_csp=True):
        for _ in range(2):
            violations = axe.Axe().run(page).response["violations"]
            severe = [v for v in violations if v["impact"] in ("serious", "critical")]
            assert [f"{v['id']}: {v['nodes'][0]['html']}" for v in severe] == []
            upload(page, image_file("red"), image_file("blue"))
            wait_for_map(page)


@pytest.mark.slow
def test_model_without_attention(browser: Browser, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint(RESNETS["ResNet"]))
    with serving(tmp_path / "model", "--num-threads", 1) as server:
        for page in open_page(browser, server, {"width": 1000, "height": 700}):
            upload(page, image_file("red"))
            wait_for_map(page)
            assert page.locator("input[value=attention]").is_hidden()


@pytest.mark.slow
def test_model_without_blocks(browser: Browser, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", color_checkpoint())
    with serving(tmp_path / "model", "--num-threads", 1) as server:
        for page in open_page(browser, server, {"width": 1000, "height": 700}):
            upload(page, image_file("red"))
            page.wait_for_selector("#scores button")
            assert page.locator("input[value=explain]").is_hidden()
            assert page.locator("input[value=attention]").is_hidden()


@pytest.mark.slow
def test_token_form(browser: Browser, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", color_checkpoint())
    with serving(tmp_path / "model", "--num-threads", 1, PATCHWORD_TOKEN="secret") as locked:
        page = browser.new_page()
        page.goto(locked.url)
        page.wait_for_selector("#key:not([hidden])")
        page.fill("#token", "secret")
        page.click("#key button")
        page.wait_for_function("() => document.getElementById('about').textContent !== '…'")
        upload(page, image_file("red"))
        page.wait_for_selector("#scores button")
        page.close()

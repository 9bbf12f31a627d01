"""Absolute links in README.md, for the page of a package index: relative links and anchors do not work there.

`python docs/absolute_links.py --ref v0.2.0` rewrites README.md of a release checkout before `python -m build`. Links
then lead to the repository at this tag, images to their raw files. Code stays as it is. docs/release.md has the steps.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/patchword/patchword"
RAW = "https://raw.githubusercontent.com/patchword/patchword"
IMAGES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
TARGET = re.compile(
    r"""(?P<before>\]\(|^\[[^\]\n]+\]:[ ]+|\b(?:src|href)=")(?P<target>[^\s()">]+)""",
    re.MULTILINE,
)
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def absolute(target: str, ref: str, root: Path) -> str:
    """Return the URL of a link target; a path that does not exist is an error."""
    if ABSOLUTE.match(target):
        return target
    path, hash_sign, anchor = target.partition("#")
    path = path.removeprefix("./").rstrip("/") or "README.md"
    if not (root / path).exists():
        raise FileNotFoundError(f"README.md links to {target}, which does not exist")
    if path.lower().endswith(IMAGES):
        return f"{RAW}/{ref}/{path}"
    kind = "tree" if (root / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/{ref}/{path}{hash_sign}{anchor}"


def make_absolute(text: str, ref: str, root: Path = ROOT) -> str:
    """Return Markdown with absolute links, also in HTML tags; code blocks and `code` are not changed."""
    parts = CODE.split(text)  # code has odd indices
    for index in range(0, len(parts), 2):
        parts[index] = TARGET.sub(lambda m: m["before"] + absolute(m["target"], ref, root), parts[index])
    return "".join(parts)


def main() -> int:
    """Rewrite README.md."""
    parser = argparse.ArgumentParser(description="Make the links of README.md absolute before a release is built.")
    parser.add_argument("--ref", required=True, help="tag or commit that the links lead to, for example v0.2.0")
    ref = parser.parse_args().ref
    readme = ROOT / "README.md"
    try:
        text = make_absolute(readme.read_text(encoding="utf-8"), ref)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

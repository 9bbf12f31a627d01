"""The server with modern families: predictions, explanations, attention and features are those of the model."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from helpers.families import FAMILY_CONFIGS, family_model
from patchword.checkpoints import Checkpoint
from patchword.data.preprocess import HALF, Preprocess
from patchword.errors import ConfigError
from patchword.inference.classifier import Classifier
from patchword.inspection import head_attention
from patchword.inspection.capture import attention_maps
from patchword.models import ViT
from patchword.serve import create_app


def make_classifier(name: str) -> Classifier:
    config = FAMILY_CONFIGS[name]
    labels = tuple(f"class {i}" for i in range(config.num_classes))
    preprocess = Preprocess(config.image_size, mean=HALF, std=HALF)
    return Classifier(Checkpoint(config, dict(family_model(config).state_dict()), preprocess, labels))


def png() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@torch.no_grad()
def test_responses_are_those_of_the_model(name: str) -> None:
    classifier, data = make_classifier(name), png()
    model, k = classifier.model, FAMILY_CONFIGS[name].num_prefix
    assert isinstance(model, ViT)
    images = classifier.preprocess.normalize(classifier.pixels(data)[None])
    with TestClient(create_app(classifier, num_threads=1, log=io.StringIO())) as client:

        def post(path: str) -> dict:
            response = client.post(path, content=data, headers={"Content-Type": "image/png"})
            assert response.status_code == 200, response.text
            return response.json()["results"][0]

        predicted = post("/v1/predict?explain=true")
        expected = classifier(data)
        assert predicted["predictions"][0]["label"] == expected.label
        assert predicted["predictions"][0]["probability"] == pytest.approx(expected.probability, rel=1e-4)
        assert predicted["explanation"]["method"] == "relevance"
        for method in ("attention", "rollout"):
            assert np.shape(post(f"/v1/explain?method={method}")["explanation"]["map"]) == (4, 4)
        np.testing.assert_allclose(post("/v1/embed")["features"], model.embed_images(images)[0], rtol=1e-3, atol=1e-4)
        values = post("/v1/attention?layer=0&head=1")["attention"]["values"]
    rows = np.frombuffer(base64.b64decode(values), np.uint8).reshape(k + 17, k + 16)[:, k:] / 255
    weights = attention_maps(model, images, [0])[0][0, 1, :, k:].numpy()
    np.testing.assert_allclose(rows[:-1], weights / weights.max(axis=1, keepdims=True), atol=0.01)
    read = head_attention(model, images)[0, 0, 1].flatten().numpy()
    np.testing.assert_allclose(rows[-1], read / read.max(), atol=0.01, err_msg="the tokens that the head reads")


def test_models_without_a_head_are_refused() -> None:
    config = FAMILY_CONFIGS["clip"].replace(num_classes=0)
    preprocess = Preprocess(config.image_size, mean=HALF, std=HALF)
    with pytest.raises(ConfigError, match="head"):
        create_app(Checkpoint(config, dict(family_model(config).state_dict()), preprocess))

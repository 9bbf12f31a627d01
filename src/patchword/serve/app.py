"""The HTTP API: endpoints, parameters and error responses."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, TextIO

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse

from .. import __version__
from ..checkpoints import Checkpoint, read_checkpoint
from ..checkpoints.card import strip_paths
from ..config import ViTConfig
from ..core.runtime import limit_threads
from ..engines.auto import select_engine
from ..errors import ConfigError, ImageError
from ..inference.classifier import Classifier, find_class, require_head
from ..inspection.explain import Method
from .limits import Limits
from .middleware import RequestMiddleware
from .problem_json import Problem, service_unavailable
from .prometheus import Metrics
from .service import Compute, DecodedUpload, Service
from .uploads import read_uploads

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PATHS = frozenset({*PAGE, "/v1/predict", "/v1/explain", "/v1/attention", "/v1/embed", "/v1/model", "/v1/openapi.json"})
PATHS |= {"/healthz", "/readyz", "/metrics"}

ERROR_RESPONSES = {
    400: "the request cannot be parsed",
    401: "the token is missing or wrong",
    408: "the request did not arrive in time",
    413: "the request is too large",
    415: "the content type is not supported",
    422: "no readable image, or an invalid parameter",
    503: "the server is overloaded",
    504: "the response timeout expired",
}
PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("title", "detail", "code", "request_id")}
    | {"status": {"type": "integer"}},
    "required": ["status", "title", "detail", "code"],
}
FILE_SCHEMA = {"type": "string", "format": "binary"}
BASE64_SCHEMA = {"type": "string", "contentEncoding": "base64"}
IMAGE_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "minItems": 1, "items": FILE_SCHEMA}},
                    "required": ["file"],
                }
            },
            "application/octet-stream": {"schema": FILE_SCHEMA},
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"image": BASE64_SCHEMA, "images": {"type": "array", "items": BASE64_SCHEMA}},
                }
            },
        },
    },
    "responses": {
        str(status): {"description": text, "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}}}
        for status, text in ERROR_RESPONSES.items()
    },
}

router = APIRouter(prefix="/v1")

TopQuery = Annotated[int, Query(ge=1, le=1_000_000, description="number of classes")]
ExplainQuery = Annotated[bool, Query(description="add a heatmap of the class, as numbers and as PNG")]
LabelQuery = Annotated[str | None, Query(max_length=200, description="class to explain, by name or index")]
IndexQuery = Annotated[int | None, Query(ge=0, description="class to explain, by index only")]
MethodQuery = Annotated[str | None, Query(max_length=40, description="explanation method; /v1/model lists them")]
LayerQuery = Annotated[int, Query(description="block, 0 for the first; negative numbers count from the end")]
HeadQuery = Annotated[int | None, Query(ge=0, description="attention head; by default the mean of all heads")]


def create_app(
    model: Classifier | Checkpoint | str,
    limits: Limits | None = None,
    token: str | None = None,
    num_threads: int | None = None,
    log: TextIO | None = None,
    name: str = "",
    engine: str = "",
) -> FastAPI:
    """Create an app for any ASGI server. The model's process starts and stops with the app's lifespan.

    Args:
        model: A classifier, a checkpoint or a model reference.
        limits: Size and time limits.
        token: What clients must send; None for no authentication.
        num_threads: CPU threads of the model; None for all cores.
        log: Where to write the JSON log; standard error by default.
        name: Title of the model.
        engine: Inference engine, as in `Classifier.load`; by default a classifier's own, else torch.
    """
    checkpoint = model.checkpoint if isinstance(model, Classifier) else model
    engine = engine or (model.engine_name if isinstance(model, Classifier) else "") or "torch"
    checkpoint = read_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
    require_head(checkpoint)
    if checkpoint.preprocess is None:
        raise ConfigError(f"A model of {checkpoint.config.in_channels} channels cannot be served: images have 1 or 3.")
    if token is not None and not token.strip():
        raise ConfigError("The token is empty. Use None for no authentication.")
    limits, metrics = limits or Limits(), Metrics(log)
    with limit_threads(num_threads):
        prepared = select_engine(engine, checkpoint, quick=True).prepared

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(checkpoint, prepared, limits, metrics, num_threads)
        try:
            await service.warm_up()
            app.state.service = service
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="patchword", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/v1/openapi.json", description="Classify images and explain the predictions.",
    )  # fmt: skip
    app.state.metrics, app.state.name, app.state.engine = metrics, name, prepared.name
    add_error_handlers(app)
    add_operational_routes(app, metrics)
    app.include_router(router)
    app.add_middleware(RequestMiddleware, limits=limits, metrics=metrics, token=token, paths=PATHS)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Return all errors as problem+json."""

    @app.exception_handler(Problem)
    async def handle_problem(request: Request, problem: Problem) -> Response:
        return problem.response(get_request_id(request))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        details = {
            404: "There is nothing at this path. /v1/openapi.json lists all paths.",
            405: f"This path takes {headers.get('Allow', 'another method')}, not {request.method}.",
        }
        detail = details.get(error.status_code, str(error.detail))
        return Problem(error.status_code, detail, headers).response(get_request_id(request))

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
        detail = "; ".join(f"{row['loc'][-1]}: {row['msg']}" for row in error.errors()[:3])
        return Problem(422, detail, code="invalid_parameter").response(get_request_id(request))


def get_request_id(request: Request) -> str:
    """Return the ID that the middleware gave to a request."""
    return str(getattr(request.state, "request_id", ""))


def add_operational_routes(app: FastAPI, metrics: Metrics) -> None:
    """Add the page, health checks and metrics."""
    folder = files("patchword.serve") / "page"
    for path, (name, media_type) in PAGE.items():
        app.get(path, include_in_schema=False)(static_endpoint((folder / name).read_bytes(), media_type))

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """The server is running."""
        return {"status": "alive"}

    @app.get("/readyz")
    async def readiness(request: Request) -> Response:
        """The model is loaded, and no shutdown has begun."""
        ready = get_service(request).ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


def static_endpoint(content: bytes, media_type: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return an endpoint without parameters (a client could set them) that always returns this content."""

    async def page() -> Response:
        return Response(content, media_type=media_type)

    return page


@router.get("/model")
async def model_info(request: Request) -> dict[str, Any]:
    """The model: labels, preprocessing, provenance, temperature, limits."""
    return {"name": request.app.state.name, **describe_model(get_service(request))}


@router.post("/predict", openapi_extra=IMAGE_UPLOAD)
async def predict(
    request: Request, top: TopQuery = 5, explain: ExplainQuery = False, label: LabelQuery = None,
    index: IndexQuery = None, method: MethodQuery = None,
) -> Response:  # fmt: skip
    """The most probable classes of each image."""
    service = get_service(request)
    if not explain and (label, index, method) != (None, None, None):
        raise Problem(422, "label, index and method need explain=true.", code="invalid_parameter")
    explanation_method = resolve_method(service, method) if explain else None
    requested = resolve_class(service, label, index)

    async def compute(image: DecodedUpload) -> dict[str, Any]:
        predictions = await service.predict(image, top)
        if explanation_method is None:
            return {"predictions": predictions}
        class_index = requested if requested is not None else predictions[0]["index"]
        explanation = await service.explain(image, class_index, explanation_method)
        return {"predictions": predictions, "explanation": explanation}

    return await process_upload(request, compute, full=explain)


@router.post("/explain", openapi_extra=IMAGE_UPLOAD)
async def explain(
    request: Request, label: LabelQuery = None, index: IndexQuery = None, method: MethodQuery = None
) -> Response:
    """A heatmap of a class for each image; by default of its most probable class."""
    service = get_service(request)
    explanation_method, requested = resolve_method(service, method), resolve_class(service, label, index)

    async def compute(image: DecodedUpload) -> dict[str, Any]:
        class_index = requested if requested is not None else (await service.predict(image, 1))[0]["index"]
        return {"explanation": await service.explain(image, class_index, explanation_method)}

    return await process_upload(request, compute, full=True)


@router.post("/attention", openapi_extra=IMAGE_UPLOAD)
async def attention(request: Request, layer: LayerQuery = -1, head: HeadQuery = None) -> Response:
    """What every patch attends to in one layer: rows of the attention map in base64, one byte per weight."""
    service = get_service(request)
    config = service.checkpoint.config
    if not isinstance(config, ViTConfig) or not config.depth:
        raise Problem(422, "This model has no attention.", code="unsupported_by_model")
    if not -config.depth <= layer < config.depth:
        raise Problem(422, f"layer: must be from 0 to {config.depth - 1}.", code="invalid_parameter")
    if head is not None and head >= config.num_heads:
        raise Problem(422, f"head: must be from 0 to {config.num_heads - 1}.", code="invalid_parameter")

    async def compute(image: DecodedUpload) -> dict[str, Any]:
        return {"attention": await service.attention(image, layer % config.depth, head)}

    return await process_upload(request, compute)


@router.post("/embed", openapi_extra=IMAGE_UPLOAD)
async def embed(request: Request) -> Response:
    """The features of each image that the head reads."""
    service = get_service(request)

    async def compute(image: DecodedUpload) -> dict[str, Any]:
        return {"features": await service.embed(image)}

    return await process_upload(request, compute)


async def process_upload(request: Request, compute: Compute, full: bool = False) -> Response:
    """Return one result per image; the request fails if no image can be read.

    Args:
        request: The request.
        compute: Computes the result of one image.
        full: Keep the whole image, to draw on it.
    """
    service = get_service(request)
    check_parameters(request)
    uploads = await read_uploads(request, service.limits)
    results = await service.run_while_connected(request, service.process_all(uploads, compute, full))
    if all("error" in result for result in results):
        codes = {result["code"] for result in results}
        detail = " ".join(f"{result['name']}: {result['error']}" for result in results[:3])
        raise Problem(422, detail, code=codes.pop() if len(codes) == 1 else ImageError.code)
    return JSONResponse({"results": results, "request_id": get_request_id(request)})


def check_parameters(request: Request) -> None:
    """Reject unknown query parameters, which FastAPI would ignore."""
    known = sorted(parameter.alias for parameter in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            detail = f"There is no parameter {name[:40]!r}. This path takes {', '.join(known) or 'none'}."
            raise Problem(422, detail, code="unknown_parameter")


def get_service(request: Request) -> Service:
    """Return the service of the app."""
    service: Service | None = getattr(request.app.state, "service", None)
    if service is None:
        raise service_unavailable("The server has not started: run the app's lifespan.")
    return service


def resolve_method(service: Service, method: str | None) -> Method:
    """Return the explanation method of a request, or the default."""
    if not service.methods:
        raise Problem(422, "This model has no blocks and cannot be explained.", code="unsupported_by_model")
    if method is None:
        return service.methods[0]
    for known in service.methods:
        if known == method:
            return known
    raise Problem(422, f"method: must be one of {', '.join(service.methods)}.", code="invalid_parameter")


def resolve_class(service: Service, label: str | None, index: int | None) -> int | None:
    """Return the index of the class that a request names; None if it names none."""
    num_classes = len(service.labels)
    if index is not None:
        if label is not None:
            raise Problem(422, "index and label exclude each other.", code="invalid_parameter")
        if index >= num_classes:
            raise Problem(422, f"index: must be from 0 to {num_classes - 1}.", code="invalid_parameter")
        return index
    try:
        return None if label is None else find_class(service.labels, label, hint=False)
    except ConfigError as error:
        detail = str(error)
        if error.code == "unknown_class":  # its message lists the classes, of which there may be a thousand
            detail = f"the model has no such class. /v1/model lists its {num_classes} classes."
        raise Problem(422, f"label: {detail}", code=error.code) from None


def describe_model(service: Service) -> dict[str, Any]:
    """Return the document of /v1/model, without the name."""
    checkpoint, config = service.checkpoint, service.checkpoint.config
    document: dict[str, Any] = {
        "architecture": type(config).__name__.removesuffix("Config"),
        "parameters": sum(t.numel() for t in checkpoint.tensors.values()),
        "config": config.to_json(),
        "labels": list(service.labels),
        "preprocess": service.preprocess.to_json(),
        "temperature": checkpoint.temperature,
        "multi_label": checkpoint.multi_label,
        "family": checkpoint.family,
        "engine": service.engine,
        "provenance": strip_paths(checkpoint.provenance),
        "methods": list(service.methods),
        "limits": vars(service.limits),
    }
    if isinstance(config, ViTConfig):
        document |= {"grid": list(config.grid), "layers": config.depth, "heads": config.num_heads}
    return document

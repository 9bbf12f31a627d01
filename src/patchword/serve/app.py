"""The HTTP surface: which path does what, with which answer. What it costs to get there lives next door."""

from collections.abc import AsyncIterator
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
from ..inference.classifier import Classifier, find_class
from .limits import Limits
from .middleware import RequestMiddleware
from .problem_json import Problem, service_unavailable
from .prometheus import Metrics
from .service import DecodedUpload, Service
from .uploads import read_uploads

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PATHS = frozenset({*PAGE, "/v1/predict", "/v1/explain", "/v1/attention", "/v1/embed", "/v1/model", "/v1/openapi.json"})
PATHS |= {"/healthz", "/readyz", "/metrics"}

ERROR_RESPONSES = {400: "not understood", 401: "no token", 408: "too slow", 413: "too large", 415: "not read here"}
ERROR_RESPONSES |= {422: "no picture, or one that cannot be read", 503: "too busy", 504: "took too long"}
PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("title", "detail", "code", "request_id")}
    | {"status": {"type": "integer"}},
    "required": ["status", "title", "detail", "code"],
}
FILE_SCHEMA = {"type": "string", "format": "binary"}
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
                    "properties": {
                        "image": {"type": "string", "contentEncoding": "base64"},
                        "images": {"type": "array", "items": {"type": "string", "contentEncoding": "base64"}},
                    },
                }
            },
        },
    },
    "responses": {
        str(status): {"description": what, "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}}}
        for status, what in ERROR_RESPONSES.items()
    },
}

router = APIRouter(prefix="/v1")  # what the model is for

Top = Annotated[int, Query(ge=1, le=1_000_000, description="how many classes")]
Explain = Annotated[bool, Query(description="add the map of the class, as numbers and as PNG")]
Label = Annotated[str | None, Query(max_length=200, description="the class to explain, by name or index")]
Index = Annotated[int | None, Query(ge=0, description="the class to explain, by index alone")]
Method = Annotated[str | None, Query(max_length=40, description="how to explain; /v1/model lists them")]
Layer = Annotated[int, Query(description="0 is the first; negative counts from the end")]
Head = Annotated[int | None, Query(ge=0, description="without it, the mean of the heads")]


def create_app(
    model: Classifier | Checkpoint | str,
    limits: Limits | None = None,
    token: str | None = None,
    num_threads: int | None = None,
    log: TextIO | None = None,
    name: str = "",
    engine: str = "",
) -> FastAPI:
    """An app for any ASGI server; the model's process starts and ends with it.

    Args:
        engine: what computes predictions, as in `Classifier.load`; by default a classifier's own, else torch
    """
    checkpoint = model.checkpoint if isinstance(model, Classifier) else model
    engine = engine or (model.engine_name if isinstance(model, Classifier) else "") or "torch"
    checkpoint = read_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
    if not checkpoint.config.num_classes or checkpoint.preprocess is None:
        raise ConfigError("Only a model with a head that takes pictures can be served.")
    if token is not None and not token.strip():
        raise ConfigError("The token is empty. Give one, or none at all.")
    limits, meters = limits or Limits(), Metrics(log)
    with limit_threads(num_threads):
        prepared = select_engine(engine, checkpoint, quick=True).prepared

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(checkpoint, prepared, limits, meters, num_threads)
        try:
            await service.warm_up()
            app.state.service = service
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="patchword", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/v1/openapi.json", description="Classify pictures, and see why.",
    )  # fmt: skip
    app.state.meters, app.state.name, app.state.engine = meters, name, prepared.name
    add_error_handlers(app)
    add_operational_routes(app, meters)
    app.include_router(router)
    app.add_middleware(RequestMiddleware, limits=limits, meters=meters, token=token, paths=PATHS)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Everything that goes wrong is told in one form."""

    @app.exception_handler(Problem)
    async def refused(request: Request, problem: Problem) -> Response:
        return problem.response(get_request_id(request))

    @app.exception_handler(HTTPException)
    async def no_way(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        said = {404: "There is nothing at this path; /v1/openapi.json lists what there is."}
        said[405] = f"This path takes {headers.get('Allow', 'another method')}, not {request.method}."
        detail = said.get(error.status_code, str(error.detail))
        return Problem(error.status_code, detail, headers).response(get_request_id(request))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        said = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()[:3])
        return Problem(422, said, code="invalid_parameter").response(get_request_id(request))


def get_request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def add_operational_routes(app: FastAPI, meters: Metrics) -> None:
    """The page, health and metrics."""
    folder = files("patchword.serve") / "page"
    for path, (name, kind) in PAGE.items():
        app.get(path, include_in_schema=False)(static_endpoint((folder / name).read_bytes(), kind))

    @app.get("/healthz")
    async def alive() -> dict[str, str]:
        """The server runs."""
        return {"status": "alive"}

    @app.get("/readyz")
    async def ready(request: Request) -> Response:
        """The model has given its first answer, and no shutdown has begun."""
        is_ready = get_service(request).ready
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(meters.text(), media_type="text/plain; version=0.0.4")


def static_endpoint(content: bytes, kind: str) -> Any:
    """An endpoint that takes nothing and always says the same. (What it took, a client could fill in.)"""

    async def page() -> Response:
        return Response(content, media_type=kind)

    return page


@router.get("/model")
async def model_info(request: Request) -> dict[str, Any]:
    """What is served: labels, preprocessing, provenance, temperature."""
    return {"name": request.app.state.name, **describe_model(get_service(request))}


@router.post("/predict", openapi_extra=IMAGE_UPLOAD)
async def predict(
    request: Request, top: Top = 5, explain: Explain = False, label: Label = None, index: Index = None,
    method: Method = None,
) -> Response:  # fmt: skip
    """The most probable classes of each picture."""
    service = get_service(request)
    if not explain and (label, index, method) != (None, None, None):
        raise Problem(422, "label, index and method go with explain=true.", code="invalid_parameter")
    way: Any = resolve_method(service, method) if explain else None
    asked = resolve_class(service, label, index)

    async def work(picture: DecodedUpload) -> dict[str, Any]:
        found: dict[str, Any] = {"predictions": await service.predictions(picture, top)}
        if explain:
            about = asked if asked is not None else found["predictions"][0]["index"]
            found["explanation"] = await service.explanation(picture, about, way)
        return found

    return await process_upload(request, work, whole=explain)


@router.post("/explain", openapi_extra=IMAGE_UPLOAD)
async def explain(request: Request, label: Label = None, index: Index = None, method: Method = None) -> Response:
    """Why this class: the map of a class, by default of the most probable one."""
    service = get_service(request)
    way, asked = resolve_method(service, method), resolve_class(service, label, index)

    async def work(picture: DecodedUpload) -> dict[str, Any]:
        about = asked if asked is not None else (await service.predictions(picture, 1))[0]["index"]
        return {"explanation": await service.explanation(picture, about, way)}

    return await process_upload(request, work, whole=True)


@router.post("/attention", openapi_extra=IMAGE_UPLOAD)
async def attention(request: Request, layer: Layer = -1, head: Head = None) -> Response:
    """What every patch looks at, in one layer: rows of the map in base64, a byte for each weight."""
    service = get_service(request)
    config = service.checkpoint.config
    if not isinstance(config, ViTConfig) or not config.depth:
        raise Problem(422, "This model has no attention.", code="unsupported_by_model")
    if not -config.depth <= layer < config.depth:
        raise Problem(422, f"layer: the model has {config.depth}, 0 to {config.depth - 1}.", code="invalid_parameter")
    if head is not None and head >= config.num_heads:
        detail = f"head: the model has {config.num_heads}, 0 to {config.num_heads - 1}."
        raise Problem(422, detail, code="invalid_parameter")

    async def work(picture: DecodedUpload) -> dict[str, Any]:
        return {"attention": await service.attention(picture, layer % config.depth, head)}

    return await process_upload(request, work)


@router.post("/embed", openapi_extra=IMAGE_UPLOAD)
async def embed(request: Request) -> Response:
    """The features of each picture that the head reads."""
    service = get_service(request)

    async def work(picture: DecodedUpload) -> dict[str, Any]:
        features = await service.batcher.ask(picture.pixels, "embed")
        return {"features": [float(f"{v:.6g}") for v in features]}

    return await process_upload(request, work)


async def process_upload(request: Request, work: Any, whole: bool = False) -> Response:
    """One result for each picture; if none could be read, the request failed."""
    service = get_service(request)
    check_parameters(request)
    pictures = await read_uploads(request, service.limits)
    results = await service.while_connected(request, service.each(pictures, work, whole))
    if all("error" in each for each in results):
        codes = {each["code"] for each in results}
        detail = " ".join(f"{each['name']}: {each['error']}" for each in results[:3])
        raise Problem(422, detail, code=codes.pop() if len(codes) == 1 else ImageError.code)
    return JSONResponse({"results": results, "request_id": get_request_id(request)})


def check_parameters(request: Request) -> None:
    """A parameter that is not there would otherwise be passed over, and its wish with it."""
    known = sorted(parameter.alias for parameter in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            detail = f"There is no parameter {name[:40]!r} here, only {', '.join(known) or 'none at all'}."
            raise Problem(422, detail, code="unknown_parameter")


def get_service(request: Request) -> Service:
    service: Service | None = getattr(request.app.state, "service", None)
    if service is None:
        raise service_unavailable("The server has not started: run the app's lifespan.")
    return service


def resolve_method(service: Service, method: str | None) -> Any:
    if not service.methods:
        raise Problem(422, "This model has no blocks, so nothing can be explained.", code="unsupported_by_model")
    if method is not None and method not in service.methods:
        detail = f"method: this model can be explained by {', '.join(service.methods)}."
        raise Problem(422, detail, code="invalid_parameter")
    return method or service.methods[0]


def resolve_class(service: Service, label: str | None, index: int | None) -> int | None:
    count = len(service.labels)
    if index is not None:
        if label is not None or index >= count:
            raise Problem(422, f"index: 0 to {count - 1}, and not beside a label.", code="invalid_parameter")
        return index
    try:
        return None if label is None else find_class(service.labels, label, hint=False)
    except ConfigError as error:
        detail = str(error)
        if error.code == "unknown_class":  # its message lists the classes, which may be a thousand
            detail = f"the model has no such class. It has {count}; /v1/model lists them."
        raise Problem(422, f"label: {detail}", code=error.code) from None


def describe_model(service: Service) -> dict[str, Any]:
    checkpoint, config = service.checkpoint, service.checkpoint.config
    said: dict[str, Any] = {
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
        said |= {"grid": list(config.grid), "layers": config.depth, "heads": config.num_heads}
    return said

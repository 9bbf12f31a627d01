"""`patchword serve`: serve a model over HTTP."""

import os
import socket

from ...errors import ConfigError, how_to_install
from ..model_args import NO_OVERRIDES, EngineName, ModelArgs, ModelReference, model_title, require_trained_head

TOKEN = "PATCHWORD_TOKEN"
MAX_DRAIN_SECONDS = 3600


def serve(
    model: ModelReference,
    model_args: ModelArgs = NO_OVERRIDES,
    host: str = "127.0.0.1",
    port: int = 8000,
    batch_size: int = 16,
    queue_size: int = 256,
    num_threads: int | None = None,
    engine: EngineName = "torch",
    drain_seconds: float = 0.0,
) -> int:
    """Serve a model over HTTP: a JSON API, and a web page to try it in the browser.

    Example: patchword serve patchword:cifar10 --port 8000

    If the environment variable PATCHWORD_TOKEN is set, clients must send its value as a bearer token. Ctrl-C or SIGTERM
    stops the server after it has responded to all accepted requests.

    Args:
        host: address to listen on; 0.0.0.0 accepts connections from other machines (then set PATCHWORD_TOKEN)
        port: TCP port to listen on; 0 picks a free one
        batch_size: maximum number of images per batch
        queue_size: maximum number of images in the server at once; further requests are rejected with status 503
        num_threads: number of CPU threads of the model; by default, all cores
        drain_seconds: seconds after SIGTERM in which requests are still accepted while /readyz returns 503, so that a
            load balancer sends them elsewhere; set it if there is one
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}.")
    for flag, value in (("batch-size", batch_size), ("queue-size", queue_size), ("num-threads", num_threads)):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} must be at least 1, not {value}.")
    if not 0 <= drain_seconds <= MAX_DRAIN_SECONDS:
        raise ConfigError(f"--drain-seconds must be between 0 and {MAX_DRAIN_SECONDS}, not {drain_seconds:g}.")
    try:
        from ...serve.limits import Limits
        from ...serve.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"Serving needs {error.name}: {how_to_install('serve')}.") from None
    token = os.environ.get(TOKEN)
    if token is not None and not (token and token == token.strip() and token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN} must be printable ASCII, not empty, without surrounding spaces. Unset it for none.")
    limits = Limits(batch_size=batch_size, queue_size=queue_size)
    with open_listener(host, port) as listener:  # a port in use is reported before the model is loaded
        checkpoint = model_args.read(model)
        require_trained_head(checkpoint)
        run_server(checkpoint, model_title(model), listener, token, num_threads, limits, engine, drain_seconds)
    return 0


def open_listener(host: str, port: int) -> socket.socket:
    """Bind a socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name != "nt":  # on Windows it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host}:{port} ({error}). Choose another --port or --host.") from None
    return listener

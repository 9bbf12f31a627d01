"""The command that serves a model: serve."""

import os
import socket

from tyro.conf import OmitArgPrefixes

from ...errors import ConfigError, how_to_install
from ..model_args import NO_OVERRIDES, EngineName, ModelReference, ModelArgs, model_title

TOKEN = "PATCHWORD_TOKEN"


def serve(
    model: ModelReference,
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    host: str = "127.0.0.1",
    port: int = 8000,
    batch: int = 16,
    queue: int = 256,
    num_threads: int | None = None,
    engine: EngineName = "torch",
) -> int:
    """Serve a model: an API, and a page to drop pictures on. A token is asked of clients if PATCHWORD_TOKEN is set.

    Example: patchword serve patchword:cifar10 --port 8000

    Args:
        host: 0.0.0.0 lets other machines in; then set a token
        port: 0 takes any that is free
        batch: pictures that go through the model together
        queue: pictures that may wait; more are refused with 503
        num_threads: cores for the model; all by default
    """
    if not 0 <= port < 2**16 or batch < 1 or queue < 1 or (num_threads is not None and num_threads < 1):
        raise ConfigError("--port must be 0 to 65535; --batch, --queue and --num-threads at least 1.")
    try:
        from ...serve.limits import Limits
        from ...serve.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"Serving needs {error.name}: {how_to_install('serve')}.") from None
    token = os.environ.get(TOKEN)
    if token is not None and not (token and token == token.strip() and token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN} must be plain ASCII, not empty, without spaces around; unset it to ask for none.")
    with listening(host, port) as listener:  # a port that is taken is told before the model is loaded
        checkpoint = reading.read(model)
        run_server(checkpoint, model_title(model), listener, token, num_threads, Limits(batch=batch, queue=queue), engine)
    return 0


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name != "nt":  # on Windows it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on ({error}). Choose another --port or --host.") from None
    return listener

"""Idempotency-Key for any ASGI application: the same request sent twice has its effect once, and one answer.

    app = IdempotencyMiddleware(app, client, principal=lambda scope: scope["user"].name)

Follows draft-ietf-httpapi-idempotency-key-header. Each request with a key is an operation of the library, whose result
is the answer: what is running, done, failed or left half done by a crash is what the log says. No framework is
imported, and nothing is kept in the process.
"""

from holdfast.integrations.asgi.answer import Answer
from holdfast.integrations.asgi.middleware import IdempotencyMiddleware

__all__ = ["Answer", "IdempotencyMiddleware"]

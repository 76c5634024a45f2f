"""Idempotency-Key for any ASGI application: a request that is sent twice has one effect and one answer. And errors as
application/problem+json, with ProblemMiddleware.

    app = IdempotencyMiddleware(app, client, principal=lambda scope: scope["user"].name)

Follows draft-ietf-httpapi-idempotency-key-header. Each request with a key is an operation whose result is the answer;
the log of operations says whether it is running, done, failed, or was interrupted by a crash. No framework is imported,
and the process keeps no state.
"""

from holdfast.integrations.asgi.answer import Answer
from holdfast.integrations.asgi.middleware import IdempotencyMiddleware
from holdfast.integrations.asgi.problem_middleware import ProblemMiddleware
from holdfast.problem_json import Problem

__all__ = ["Answer", "IdempotencyMiddleware", "Problem", "ProblemMiddleware"]

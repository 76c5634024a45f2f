"""Errors of any ASGI application as application/problem+json: its own, such as 410 for a session that has ended, and
503 for what holdfast refuses."""

from __future__ import annotations

from holdfast.integrations.asgi.problem import App, Message, Receive, Scope, Send, send_problem
from holdfast.integrations.unavailable import unavailable
from holdfast.problem_json import Problem


class ProblemMiddleware:
    """Answers a request that raises a ``Problem``, wherever it is raised:

        app.add_middleware(ProblemMiddleware)               # Starlette and FastAPI; elsewhere ProblemMiddleware(app)
        raise Problem(410, "session 's-1' has ended", state="STOPPED")

    What holdfast raises because something is taken, lost, or cannot be confirmed is answered with 503 and Retry-After:
    ``retry_after`` seconds. Other errors pass, and so does every error of an answer that has begun.
    """

    def __init__(self, app: App, *, retry_after: int = 1) -> None:
        self.app, self._retry_after = app, retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        has_begun = False

        async def forward(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, forward)
        except Exception as error:
            problem = error if isinstance(error, Problem) else unavailable(error, self._retry_after)
            if problem is None or has_begun:
                raise
            await send_problem(problem, scope, send)

"""The body of a response: its JSON, and OpenAI's events of a stream."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from fastapi.concurrency import run_in_threadpool

from memstore.serve.answering.answers import Outcome
from memstore.serve.api_errors import as_api_error
from memstore.serve.http.openai.response_request import Asked
from memstore.serve.http.sse import event
from memstore.serve.state.conversations import Conversations


class ResponseBody:
    """Of one answer."""

    def __init__(self, model: str, conversations: Conversations, asked: Asked) -> None:
        self._conversations, self._asked = conversations, asked
        self._message = f"msg_{secrets.token_hex(12)}"
        given, attached = asked.request, asked.attached
        self._calls = [] if attached is None else [attached.call([asked.question.text], None)]
        conversation = asked.question.conversation
        named = None if conversation is None else {"id": conversation.id}
        self._body: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "conversation": named,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": given.previous_response_id,
            "store": asked.stored,
            "temperature": asked.question.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in given.tools or []],
            "top_p": asked.question.sampling.top_p,
            "truncation": "auto",
            "usage": None,
            "user": given.user,
        }

    def finished(self, text: str, outcome: Outcome) -> dict[str, Any]:
        """The whole response, stored if it shall be."""
        cut = outcome.finish_reason == "length"
        body = {
            **self._body,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self._searched(outcome), self._output(text, outcome)],
            "usage": {
                "input_tokens": outcome.prompt_tokens,
                "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
                "output_tokens": len(outcome.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": outcome.prompt_tokens + len(outcome.tokens),
            },
        }
        if self._asked.stored:
            self._conversations.add_response(
                self._asked.question.owner, outcome.key, self._asked.items, body
            )
        return {**body, "memstore": outcome.memstore}

    def _searched(self, outcome: Outcome) -> list[dict[str, Any]]:
        attached = self._asked.attached
        if attached is None or "file_search_call.results" not in (
            self._asked.request.include or []
        ):
            return self._calls
        call = attached.call([self._asked.question.text], outcome)
        return [{**one, "results": call["results"]} for one in self._calls]

    def _output(self, text: str, outcome: Outcome) -> dict[str, Any]:
        attached = self._asked.attached
        notes = [] if attached is None else attached.annotations(outcome, text)
        cut = outcome.finish_reason == "length"
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if cut else "completed",
            "content": [
                {"type": "output_text", "text": text, "annotations": notes, "logprobs": []}
            ],
        }

    async def events(self, pieces: AsyncIterator[str], outcome: Outcome) -> AsyncIterator[str]:
        """OpenAI's events of a streamed response."""
        number = 0

        def numbered(kind: str, **more: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **more}, kind)

        begun = False
        location = {"item_id": self._message, "output_index": len(self._calls), "content_index": 0}
        try:
            async for piece in pieces:
                if not begun:  # what is refused is refused before anything is sent
                    begun = True
                    for one in self._begun(numbered, location):
                        yield one
                if piece:
                    yield numbered(
                        "response.output_text.delta", **location, delta=piece, logprobs=[]
                    )
            body = await run_in_threadpool(self.finished, outcome.text, outcome)
        except Exception as error:
            if not begun:
                raise
            failed = as_api_error(error)
            problem = {"code": failed.code or "server_error", "message": failed.message}
            body = {**self._body, "status": "failed", "error": problem}
            yield numbered("response.failed", response=body)
            return
        message = body["output"][-1]
        (part,) = message["content"]
        for index, note in enumerate(part["annotations"]):
            kind = "response.output_text.annotation.added"
            yield numbered(kind, **location, annotation_index=index, annotation=note)
        yield numbered("response.output_text.done", **location, text=part["text"], logprobs=[])
        yield numbered("response.content_part.done", **location, part=part)
        at = location["output_index"]
        yield numbered("response.output_item.done", output_index=at, item=message)
        yield numbered(f"response.{body['status']}", response=body)

    def _begun(self, numbered: Callable[..., str], location: dict[str, Any]) -> Iterator[str]:
        """The events before the text."""
        yield numbered("response.created", response=self._body)
        yield numbered("response.in_progress", response=self._body)
        for index, call in enumerate(self._calls):
            item = {**call, "status": "in_progress"}
            yield numbered("response.output_item.added", output_index=index, item=item)
            for state in ("in_progress", "searching", "completed"):
                kind = f"response.file_search_call.{state}"
                yield numbered(kind, output_index=index, item_id=call["id"])
            yield numbered("response.output_item.done", output_index=index, item=call)
        item = {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield numbered("response.output_item.added", output_index=len(self._calls), item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield numbered("response.content_part.added", **location, part=part)

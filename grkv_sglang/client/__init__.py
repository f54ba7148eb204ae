"""Clients of a server with the plugin, synchronous and asynchronous: chats and completions with compression
options, streams, the state and an operator's commands.

    from grkv_sglang.client import CompressionOptions, GrkvClient

    with GrkvClient("http://127.0.0.1:30000") as client:
        answer = client.chat(
            [
                {"role": "system", "content": "Answer from the document."},
                {"role": "user", "content": document},
                {"role": "user", "content": "Who keeps the clock?"},
            ],
            options=CompressionOptions(prefix_end="document", budget=0.1),
        )
        print(answer.text, answer.usage.cached_tokens, answer.grkv)

SGLang tells what served a prompt (`Completion.grkv`) for chats that are not streamed and on its native route
(`stream_generate`); the number of cached tokens it tells everywhere. Imports neither torch nor SGLang.
"""

from grkv_sglang.client.async_client import AsyncGrkvClient, AsyncTextStream
from grkv_sglang.client.calls import CompressionOptions, GenerationFields, Message
from grkv_sglang.client.errors import GrkvApiError, GrkvConnectionError, GrkvError
from grkv_sglang.client.models import Completion, Served, Usage
from grkv_sglang.client.retry import RetryPolicy, Timeouts
from grkv_sglang.client.state import GrkvState, SpanState
from grkv_sglang.client.sync_client import GrkvClient, TextStream

__all__ = [
    "AsyncGrkvClient",
    "AsyncTextStream",
    "Completion",
    "CompressionOptions",
    "GenerationFields",
    "GrkvApiError",
    "GrkvClient",
    "GrkvConnectionError",
    "GrkvError",
    "GrkvState",
    "Message",
    "RetryPolicy",
    "Served",
    "SpanState",
    "TextStream",
    "Timeouts",
    "Usage",
]

"""An answer as it comes, from a running server (`make serve`), by the openai package.

    python examples/client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    print("models:", ", ".join(model.id for model in client.models.list()))
    stream = client.chat.completions.create(
        model="coder",
        messages=[{"role": "user", "content": "def fibonacci(n):"}],
        max_tokens=48,
        temperature=0.2,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-slo-ttft-ms": "10000"},  # else it is refused at once, with 429
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
            if choice.finish_reason:
                print(f"\nended: {choice.finish_reason}")
        if chunk.usage:
            print(f"{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")

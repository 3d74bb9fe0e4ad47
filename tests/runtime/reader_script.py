"""An agent that reads a long text once and then answers; prints what each answer cost. Killed by its test."""

import json
import random
import sys
from pathlib import Path

import anyio

from offbook.actors import Agent, Message, Request, on
from offbook.runtime import Runtime

sys.path.insert(0, str(Path(__file__).parents[1]))
from orphan import end_with_parent

end_with_parent()

WORDS = (
    "the old mill",
    "by the river",
    "was sold to",
    "a man from town",
    "who mended",
    "its wheel and bread",
)


class Read(Message):
    text: str


class Answer(Request[dict[str, str | int]]):
    question: str


class Reader(Agent):
    @on
    async def read(self, msg: Read) -> None:
        await self.observe(msg.text)

    @on
    async def answer(self, ask: Answer) -> dict[str, str | int]:
        reply = await self.say(ask.question, max_tokens=8)
        usage = reply.usage
        return {
            "text": reply.text,
            "source": usage.source,
            "reused": usage.reused_tokens,
            "context": usage.context_tokens,
        }


async def main() -> None:
    choice = random.Random(3).choice
    async with Runtime("reader", memory="800 MiB") as rt:
        await rt.spawn(Reader, "r")
        await rt.tell("reader/r", Read(" ".join(choice(WORDS) for _ in range(200))), once="text")
        answer = await rt.ask("reader/r", Answer("What is the capital of France?"), timeout=300)
        print(json.dumps(answer), flush=True)  # committed: the answer has left the host
        await rt.run()


anyio.run(main)

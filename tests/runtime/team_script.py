"""A team as a script, for tests of the command line: an agent, an engine process without a model."""

import sys
from pathlib import Path

from offbook.actors import Actor, Agent, Message, Request, on
from offbook.runtime import Runtime
from offbook.runtime import child as child_module

sys.path.insert(0, str(Path(__file__).parents[1]))
from orphan import end_with_parent

end_with_parent()

FAKE = Path(__file__).with_name("fake_engine.py")
child_module.engine_command = lambda config: [sys.executable, str(FAKE), "--config", config.to_json()]


class Ask(Request[str]):
    question: str
    politely: bool = True


class Count(Request[int]):
    pass


class Heard(Message):
    text: str


class Neighbour(Agent):
    heard: int = 0

    @on
    async def hear(self, msg: Heard) -> None:
        self.heard += 1

    @on
    async def answer(self, ask: Ask) -> str:
        async with self.speak(ask.question) as turn:
            async for piece in turn:
                await ask.progress(piece)
        return turn.text

    @on
    async def count(self, ask: Count) -> int:
        return self.heard


class Silent(Actor):
    @on
    async def count(self, ask: Count) -> int:
        return 0


async def main() -> None:
    async with Runtime("team") as rt:
        await rt.ready()
        await rt.spawn(Neighbour, "ann")
        await rt.spawn(Silent, "stone")
        print("up", *sys.argv[1:], flush=True)
        await rt.run()
        print("down", flush=True)

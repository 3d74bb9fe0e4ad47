"""The example of the README, with a fake engine."""

from __future__ import annotations

from pathlib import Path

from offbook.actors import Agent, Message, Request, on
from offbook.actors.testing import team, text_of


class Heard(Message):
    text: str


class Ask(Request[str]):
    question: str


class Villager(Agent):
    trade: str
    rumours: list[str] = []
    topics = ("square",)

    def persona(self) -> str:
        return f"You are {self.key}, a {self.trade} in a small village."

    @on
    async def hear(self, msg: Heard) -> None:
        self.rumours.append(msg.text)
        if len(self.rumours) < 2:
            reply = await self.say(f"You hear: {msg.text!r}. Answer in one sentence.", max_tokens=40)
            await self.publish("square", Heard(text=reply.text))

    @on
    async def answer(self, ask: Ask) -> str:
        async with self.speak(ask.question) as turn:
            async for piece in turn:
                await ask.progress(piece)
        return turn.text


async def test_villagers_hear_speak_publish_and_answer(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        ann = await host.spawn(Villager, "ann", trade="baker")
        await host.spawn(Villager, "bob", trade="smith")
        await host.publish("square", Heard(text="A stranger came."), once="opening")
        await host.publish("square", Heard(text="A stranger came."), once="opening")
        await host.idle()
        assert len(engine.requests) == 2
        pieces = []
        async with host.bus.stream(ann, {"type": "Ask", "question": "Plans?"}) as reply:
            async for piece in reply:
                pieces.append(piece)
        assert reply.result == "You said: Plans?"
        assert pieces == ["You ", "said: ", "Plans?"]
        page = await host.actors()
        assert [one.id for one in page.actors] == ["villager/ann", "villager/bob"]
        assert text_of(engine.requests[-1].memory.transcript).startswith("[system]You are ann, a baker")
    async with team(tmp_path) as (host, engine):
        await host.spawn(Villager, "ann")
        assert await host.ask(ann, Ask("Again?")) == "You said: Again?"
        assert "Plans?" in text_of(engine.requests[-1].memory.transcript)
        assert not host.failures

"""Eight villagers who hear rumours, pass them on, and answer a visitor: agents with durable memory.

    offbook run examples/village.py           # or: python -m examples.village

Each villager starts with a life story of more than a thousand tokens, read once (``observe``) and kept as
attention state from then on. Every day one of them hears news and retells it on the village square; the
other seven hear it there and remember. Kill the process at any time and start it again: whoever had heard
the news of the day has heard it, once, and everyone still knows their story without reading it again.
"""

from __future__ import annotations

import argparse
import random
from functools import partial

import anyio

from offbook.actors import Agent, Message, Reply, Request, Speech, on
from offbook.runtime import Runtime

MODEL = "wheel:smollm2-135m-instruct"

SQUARE, TURNS = "square", "turns"

TRADES = {
    "ann": "baker", "bert": "smith", "clara": "midwife", "dora": "weaver",
    "edwin": "miller", "fern": "herbalist", "giles": "ferryman", "hilda": "beekeeper",
}  # fmt: skip

NEWS = [
    "A stranger with a covered cart took a room at the inn and paid in foreign silver.",
    "The millstream ran backwards for an hour last night, and the geese would not settle.",
    "Someone left a basket of blue eggs at the chapel door with no note.",
    "The bridge toll will double at the new moon, says the clerk from the town.",
    "Old Tam's lost ring was found inside a loaf of bread.",
    "A bell was heard from the lake where the drowned village lies.",
    "The stranger has asked three people where the old well is.",
    "Two of the king's riders watered their horses here and would not say why.",
]


class Story(Message):
    """What a villager remembers before the first day."""

    text: str


class Rumour(Message):
    """News of day ``day``, as ``teller`` tells it."""

    day: int
    text: str
    teller: str = ""


class Ask(Request[str]):
    """A visitor's question."""

    question: str


class Report(Request[dict[str, list[int] | int]]):
    """What this villager's durable state says."""


class Turn(Message):
    """One finished turn and what it cost; published in the turn's own commit, so once, or not at all."""

    agent: str
    what: str
    said: str
    source: str
    reused: int
    prefilled: int
    generated: int
    context: int
    ttft_ms: float
    queue_ms: float
    decode_ms: float
    evictions: int


class Villager(Agent):
    """A person of the village. The annotated fields are durable state, and so is what they heard and said."""

    topics = (SQUARE,)

    trade: str
    days: list[int] = []
    answered: int = 0

    def persona(self) -> str:
        return (
            f"You are {self.key.title()}, the {self.trade} of a small village. You speak plainly, "
            "in one short sentence, and only of what you know."
        )

    @on
    async def remember(self, story: Story) -> None:
        await self.observe(story.text)

    @on
    async def hear(self, rumour: Rumour) -> None:
        self.days.append(rumour.day)
        told_by = f"{rumour.teller.title()} says" if rumour.teller else "You are the first to hear"
        reply = await self.say(
            f"{told_by}: {rumour.text!r} Tell a neighbour in one sentence.",
            max_tokens=28, temperature=0.7, top_p=0.9, seed=rumour.day,
        )  # fmt: skip
        if not rumour.teller:
            await self.publish(SQUARE, Rumour(rumour.day, reply.text, self.key))
        await self.publish(TURNS, turn_of(self.key, f"day {rumour.day + 1}", reply))

    @on
    async def answer(self, ask: Ask) -> str:
        self.answered += 1
        async with self.speak(ask.question, max_tokens=24) as speech:
            async for piece in speech:
                await ask.progress(piece)
        await self.publish(TURNS, turn_of(self.key, "answer", speech))
        return speech.text

    @on
    async def report(self, ask: Report) -> dict[str, list[int] | int]:
        return {"days": self.days, "answered": self.answered, "tokens": self.memory.tokens}


def turn_of(agent: str, what: str, reply: Reply | Speech) -> Turn:
    """The record of a turn, from the usage that comes with every reply."""
    usage = reply.usage
    return Turn(
        agent, what, reply.text, usage.source, usage.reused_tokens, usage.prefilled_tokens,
        usage.generated_tokens, usage.context_tokens, usage.ttft_ms, usage.queue_ms, usage.decode_ms,
        usage.evictions,
    )  # fmt: skip


def life_story(name: str, trade: str, sentences: int = 34) -> str:
    """The same some 1,200 tokens for the same villager, and different ones for every other."""
    pick = random.Random(name).choice
    lines = [f"These are the memories of {name.title()}, the {trade}."]
    for year in range(sentences):
        lines.append(
            f"In the year {1300 + year // 2}, in {pick(_SEASONS)}, {pick(_PEOPLE)} {pick(_DEEDS)} "
            f"{pick(_PLACES)}, and {name.title()} {pick(_FEELINGS)}."
        )
    lines.append("From now on you hear what happens in the village, day by day.")
    return " ".join(lines)


_SEASONS = [
    "a wet spring",
    "a dry summer",
    "the harvest",
    "a hard winter",
    "the week of the fair",
    "the floods",
]
_PEOPLE = [
    "the priest",
    "a cousin from the hills",
    "the reeve",
    "young Wat",
    "the widow Marsh",
    "a tinker",
    "Old Tam",
]
_DEEDS = [
    "sold a lame horse near", "hid a chest of letters under", "planted three pear trees behind",
    "lost a wager about", "saw a white hare run past", "mended the roof of", "quarrelled over the rent of",
]  # fmt: skip
_PLACES = [
    "the chapel",
    "the old well",
    "the mill",
    "the inn",
    "the ferry landing",
    "the north field",
    "the tithe barn",
]
_FEELINGS = [
    "told nobody", "laughed about it for days", "never forgave it", "learned a useful trick from it",
    "paid two pennies for the trouble", "kept a pebble from that day", "dreamed of it afterwards",
]  # fmt: skip


async def went_round(rt: Runtime, day: int) -> None:
    """Returns once everyone has heard the news of a day: the topic replays what was before a restart."""
    missing = set(TRADES)
    async with rt.subscribe(TURNS, after=0) as turns:
        async for event in turns:
            turn = event.decode(Turn)
            if turn.what == f"day {day + 1}":
                missing.discard(turn.agent)
            if not missing:
                return


async def main(days: int = 3, *, memory: int | str | None = None, stay: bool = False) -> None:
    """Run the village until the news of ``days`` days went round; ``stay`` waits for visitors after that."""
    async with Runtime("village", model=MODEL, memory=memory) as rt:
        for name, trade in TRADES.items():
            await rt.spawn(Villager, name, trade=trade)
            await rt.tell(f"villager/{name}", Story(life_story(name, trade)), once=f"story of {name}")
        if stay:
            print('the village is up: ask villager/ann, as in: offbook ask villager/ann "Who are you?"; '
                  "offbook ps shows all", flush=True)  # fmt: skip
        for day in range(days):
            teller = list(TRADES)[day % len(TRADES)]
            await rt.tell(f"villager/{teller}", Rumour(day, NEWS[day % len(NEWS)]), once=f"news of day {day}")
            await rt.run(until=partial(went_round, rt, day))
        if stay:
            await rt.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--memory", help="memory budget of the engine, such as '900 MiB'")
    parser.add_argument("--stay", action="store_true", help="wait for visitors when all news went round")
    options = parser.parse_args()
    anyio.run(lambda: main(options.days, memory=options.memory, stay=options.stay))

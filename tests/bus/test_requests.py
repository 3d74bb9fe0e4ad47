"""Tell, ask and stream between two peers: answers, errors, deadlines and cancellation."""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec
import pytest

from offbook.bus import MAX_BODY, Broker, BrokerStatistics, Delivery, Kind, connect
from offbook.bus.errors import (
    ActorFailed,
    BadMessage,
    Cancelled,
    CycleError,
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    MessageTooLarge,
    NoSuchActor,
    ProtocolError,
    RemoteError,
    UnknownMessageType,
)


class Question(msgspec.Struct, tag=True):
    text: str


class Answer(msgspec.Struct, tag=True):
    text: str


async def test_ask_gets_its_reply(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), kit.serving(endpoint, "echo/*", kit.echo), connect(endpoint) as bus:
        assert await bus.ask("echo/x", {"type": "Q", "n": 1}) == {"n": 1}
        assert await bus.ask("echo/user@example.com", Question("hi"), returns=Question) == Question("hi")


async def test_tell_returns_once_it_is_accepted(endpoint: str, kit: Any) -> None:
    accepted: list[str] = []

    async def handler(delivery: Delivery) -> None:
        assert delivery.envelope.kind is Kind.TELL
        assert not delivery.expects_reply
        accepted.append(delivery.envelope.type)
        await delivery.accept()

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        await bus.tell("v/a", {"type": "Heard", "text": "x"})
        assert accepted == ["Heard"]


async def test_the_envelope_carries_what_the_sender_says(endpoint: str, kit: Any) -> None:
    seen: list[Any] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.envelope)
        await delivery.reply(None)

    meta = {
        "id": "m1",
        "sender": "v/b",
        "correlation": "c1",
        "chain": ("v/b",),
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        "type": "Named",
    }
    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        assert await bus.ask("v/a", b"\xc0", timeout=5, **meta) is None
    (envelope,) = seen
    assert {name: getattr(envelope, name) for name in meta} == meta
    assert 0 < envelope.deadline - time.time() <= 5


async def test_streaming_gives_the_pieces_then_the_result(endpoint: str, kit: Any) -> None:
    async def handler(delivery: Delivery) -> None:
        for piece in ("a", "b", "c"):
            await delivery.progress(piece)
        await delivery.reply(Answer("abc"))

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        async with bus.stream("v/a", Question("?"), returns=Answer) as reply:
            with pytest.raises(InvalidRequest, match="iterate"):
                _ = reply.result
            assert [piece async for piece in reply] == ["a", "b", "c"]
            assert reply.result == Answer("abc")
        async with bus.stream("v/a", Question("?")) as reply:
            assert await reply.final() == {"type": "Answer", "text": "abc"}
        # The same handler, asked without streaming: its pieces go nowhere.
        assert await bus.ask("v/a", Question("?"), returns=Answer) == Answer("abc")


async def test_a_question_asked_again_gets_its_own_answer(endpoint: str, kit: Any) -> None:
    came: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        came.append(delivery)

    async def ask() -> None:
        answers.append(await bus.ask("v/a", Question("?"), id="q", timeout=10))

    answers: list[Any] = []
    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await kit.eventually(lambda: len(came) == 1)
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await kit.eventually(lambda: len(came) == 2)
            await came[0].fail(Cancelled("nobody waits for the first one"))
            await bus.ask("broker/main", b"\xc0", type="Look")  # what was said before has been heard
            await came[1].reply("yes")
        assert answers == ["yes"]
        assert broker.statistics().pending == 0


async def test_errors_keep_their_type(endpoint: str, kit: Any) -> None:
    async def handler(delivery: Delivery) -> None:
        try:
            delivery.decode(Question)
        except (UnknownMessageType, BadMessage) as exc:
            await delivery.fail(exc)
            return
        await delivery.progress("first")
        await delivery.fail(ActorFailed("boom", actor="v/a") if delivery.expects_reply else ValueError("v"))

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        with pytest.raises(ActorFailed) as caught:
            await bus.ask("v/a", Question("?"))
        assert caught.value.details == {"actor": "v/a"}
        with pytest.raises(RemoteError, match="ValueError: v"):
            await bus.tell("v/a", Question("?"))
        with pytest.raises(UnknownMessageType, match="'Nope'"):
            await bus.ask("v/a", {"type": "Nope"})
        with pytest.raises(BadMessage):
            await bus.ask("v/a", b"\xc1", type="Question")
        with pytest.raises(BadMessage):
            await bus.ask("v/a", {"type": "Question", "text": 3})
        pieces = []
        async with bus.stream("v/a", Question("?")) as reply:
            with pytest.raises(ActorFailed):
                async for piece in reply:
                    pieces.append(piece)
        assert pieces == ["first"]


async def test_an_error_in_the_callers_block_comes_out_as_it_is(endpoint: str) -> None:
    async with Broker(endpoint):
        with pytest.raises(ZeroDivisionError):
            async with connect(endpoint):
                _ = 1 / 0


async def test_bad_arguments_are_refused_before_anything_is_sent(endpoint: str) -> None:
    async with Broker(endpoint) as broker, connect(endpoint) as bus:
        before = broker.statistics().received
        for to in ("nobody", "v/*", "v/" + "k" * 10_000, "v/\n"):
            with pytest.raises(InvalidAddress):
                await bus.tell(to, {})
        for timeout in (0, -1, float("nan"), float("inf"), "1"):
            with pytest.raises(InvalidRequest, match="timeout"):
                await bus.ask("v/a", {}, timeout=timeout)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(MessageTooLarge):
            await bus.ask("v/a", bytes(64 * 1024 * 1024))
        with pytest.raises(MessageTooLarge):
            bus.stream("v/a", bytes(MAX_BODY + 1))
        with pytest.raises(InvalidRequest, match="id"):
            await bus.tell("v/a", {}, id="")
        with pytest.raises(DeadlineExceeded):
            await bus.ask("v/a", {}, deadline=time.time() - 1)
        with pytest.raises(InvalidRequest, match="chain"):
            await bus.ask("v/a", {}, chain=tuple(f"v/{i}" for i in range(257)))
        with pytest.raises(InvalidAddress):
            await bus.publish("", {})
        with pytest.raises(InvalidRequest, match="after"):
            bus.subscribe("t", after=-1)
        assert broker.statistics().received == before


async def test_the_largest_body_passes(endpoint: str, kit: Any) -> None:
    async def handler(delivery: Delivery) -> None:
        await delivery.reply(delivery.body)

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        body = msgspec.msgpack.encode(b"x" * (MAX_BODY - 5))
        assert len(body) == MAX_BODY
        assert await bus.ask("v/a", body, returns=bytes) == b"x" * (MAX_BODY - 5)


async def test_a_reply_that_is_too_large_is_refused_at_the_replier(endpoint: str, kit: Any) -> None:
    async def handler(delivery: Delivery) -> None:
        try:
            await delivery.reply(bytes(MAX_BODY + 1))
        except MessageTooLarge as exc:
            await delivery.fail(exc)

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        with pytest.raises(MessageTooLarge):
            await bus.ask("v/a", {})


@pytest.mark.parametrize("chain", [("v/a",), ("v/a", "v/b", "v/c")])
async def test_an_ask_that_would_wait_for_itself_fails_at_once(endpoint: str, chain: tuple[str, ...]) -> None:
    async with Broker(endpoint), connect(endpoint) as bus:
        with pytest.raises(CycleError, match=" -> ".join([*chain, "v/a"])) as caught:
            await bus.ask("v/a", {}, chain=chain)
        assert caught.value.details["chain"] == [*chain, "v/a"]
        with pytest.raises(CycleError):
            bus.stream("v/a", {}, chain=chain)
        with pytest.raises(NoSuchActor):  # a tell waits for nobody, so it may go round
            await bus.tell("v/a", {}, chain=chain)


async def test_an_address_nobody_serves_fails_at_once(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as bus:
        for send in (bus.ask, bus.tell):
            with pytest.raises(NoSuchActor, match="engine/main"):
                await send("engine/main", {})


async def test_the_exact_address_goes_before_the_pattern(endpoint: str, kit: Any) -> None:
    def named(name: str) -> Any:
        async def handler(delivery: Delivery) -> None:
            await delivery.reply(name)

        return handler

    async with (
        Broker(endpoint),
        kit.serving(endpoint, "v/*", named("all")),
        kit.serving(endpoint, "v/a", named("a")) as one,
        connect(endpoint) as bus,
    ):
        assert [await bus.ask(to, {}) for to in ("v/a", "v/b")] == ["a", "all"]
        await one.unserve("v/a")
        assert await bus.ask("v/a", {}) == "all"


async def test_a_pattern_has_one_server(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), kit.serving(endpoint, "v/*", kit.echo, "first"), connect(endpoint) as bus:
        with pytest.raises(ProtocolError, match="'first'"):
            await bus.serve("v/*")
        with pytest.raises(InvalidAddress):
            await bus.serve("v")
        assert await bus.ask("v/a", {"n": 1}) == {"n": 1}


async def test_a_deadline_ends_the_ask_and_tells_the_receiver(endpoint: str, kit: Any) -> None:
    told = anyio.Event()

    async def handler(delivery: Delivery) -> None:
        await delivery.cancelled.wait()
        told.set()

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        with pytest.raises(DeadlineExceeded, match="v/a"):
            await bus.ask("v/a", {}, timeout=0.05)
        with anyio.fail_after(5):
            await told.wait()


async def test_a_reply_after_the_deadline_is_discarded(endpoint: str, kit: Any) -> None:
    replied = anyio.Event()

    async def handler(delivery: Delivery) -> None:
        if delivery.envelope.type == "Slow":
            await delivery.cancelled.wait()
            await delivery.reply("too late")
            replied.set()
        else:
            await delivery.reply("in time")

    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        with pytest.raises(DeadlineExceeded):
            await bus.ask("v/a", {"type": "Slow"}, timeout=0.02)
        with anyio.fail_after(5):
            await replied.wait()
        assert await bus.ask("v/a", {"type": "Quick"}) == "in time"
        assert broker.statistics().late_replies == 0, "who was told that nobody waits says nothing"
        assert broker.statistics().pending == 0


async def test_cancelling_an_ask_or_leaving_a_stream_cancels_it_at_the_receiver(
    endpoint: str, kit: Any
) -> None:
    arrived, cancelled = [anyio.Event() for _ in range(2)], [anyio.Event() for _ in range(2)]

    async def handler(delivery: Delivery) -> None:
        number = delivery.decode()["n"]
        arrived[number].set()
        await delivery.progress("piece")
        await delivery.cancelled.wait()
        cancelled[number].set()
        await delivery.progress("for nobody")
        await delivery.reply("for nobody")

    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bus.ask, "v/a", {"n": 0})
            await arrived[0].wait()
            tasks.cancel_scope.cancel()
        async with bus.stream("v/a", {"n": 1}) as reply:
            async for _ in reply:
                break
        with anyio.fail_after(5):
            for event in cancelled:
                await event.wait()
        assert broker.statistics().cancelled == 2


async def test_an_id_in_flight_cannot_be_used_again(endpoint: str, kit: Any) -> None:
    arrived = anyio.Event()

    async def handler(delivery: Delivery) -> None:
        arrived.set()
        await delivery.cancelled.wait()

    async with (
        Broker(endpoint),
        kit.serving(endpoint, "v/*", handler),
        connect(endpoint) as bus,
        connect(endpoint) as other,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            await bus.ask("v/a", {}, id="same")

        tasks.start_soon(ask)
        await arrived.wait()
        for client in (bus, other):
            with pytest.raises(InvalidRequest, match="'same'"):
                await client.ask("v/a", {}, id="same")
        tasks.cancel_scope.cancel()


async def test_order_from_one_sender_to_one_receiver_is_kept(endpoint: str, kit: Any) -> None:
    got: list[int] = []
    async with Broker(endpoint), connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")
        async with anyio.create_task_group() as tasks:
            for number in range(2000):  # many more than the window holds
                tasks.start_soon(bus.tell, "v/a", {"n": number})
            async for delivery in server.deliveries():
                got.append(delivery.decode()["n"])
                await delivery.accept()
                if len(got) == 2000:
                    break
    assert got == list(range(2000))


async def test_only_the_first_answer_counts(endpoint: str, kit: Any) -> None:
    async def handler(delivery: Delivery) -> None:
        await delivery.accept()
        assert not delivery.answered
        await delivery.reply(1)
        assert delivery.answered
        await delivery.reply(2)
        await delivery.fail(ActorFailed("3"))

    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        assert [await bus.ask("v/a", {}) for _ in range(3)] == [1, 1, 1]
        assert broker.statistics().late_replies == 0


async def test_a_peer_may_serve_and_ask_itself(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), kit.serving(endpoint, "v/*", kit.echo) as bus:
        assert await bus.ask("v/a", {"n": 1}) == {"n": 1}


async def test_the_broker_answers_with_its_statistics(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", kit.echo), connect(endpoint) as bus:
        for _ in range(600):  # more than a window: its answers give credit back
            statistics = await bus.ask("broker/main", {"type": "Statistics"}, returns=BrokerStatistics)
        assert statistics.peers == 2
        assert statistics.patterns == 1
        assert statistics == broker.statistics()
        with pytest.raises(ProtocolError, match="broker's own"):
            await bus.serve("broker/main")

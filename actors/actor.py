"""The base class of actors: durable fields, handlers, timers, and what a handler may do.

Owns what a class definition means (:class:`ActorSpec`) and the methods that users call on ``self``. The
methods only record effects in the current turn; the turn commits them. See ARCHITECTURE.md for the rules.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import types
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from offbook.bus.address import check_kind, check_topic, parse_address
from offbook.bus.errors import InvalidAddress, InvalidRequest

from .clock import Seconds, seconds
from .message import Request, T, check_type, derive_id, names, reply_type, tag_of
from .state import StateSchema
from .supervision import Supervision

if TYPE_CHECKING:
    from .turn import Turn

MAX_DELAY_SECONDS = 100 * 365.25 * 86400
"""Of a timer: what is longer is a slip, and past some length the clock loses its seconds."""

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True)
class Handler:
    """One ``@on`` method: the message class it takes, and what it answers."""

    name: str
    message: type[msgspec.Struct]
    reply: Any


@dataclass(frozen=True)
class ActorSpec:
    """What the host needs to know of an actor class; made once per class by :func:`spec_of`."""

    kind: str
    cls: type[Actor]
    schema: StateSchema
    handlers: dict[str, Handler]
    ticks: dict[str, float]
    topics: tuple[str, ...]
    supervision: Supervision
    has_first_turn: bool


def on(method: F) -> F:
    """Mark an async method as the handler of the message class that annotates its first argument.

    ``A | B`` takes both. The answer to a ``Request[T]`` is what the method returns.
    """
    method.__offbook_on__ = True  # type: ignore[attr-defined]  # a mark that spec_of looks for
    return method


def every(period: Seconds) -> Callable[[F], F]:
    """Mark an async method without arguments to be called every ``period`` seconds of the host's clock.

    The timer is durable: it starts when the actor is spawned and survives restarts. Periods that were
    missed are made up for by one call.

    Raises:
        ValueError: the period is not positive.
    """
    length = seconds(period)
    if not length > 0:
        raise ValueError(f"@every needs a positive number of seconds, got {length}")

    def mark(method: F) -> F:
        method.__offbook_every__ = length  # type: ignore[attr-defined]  # a mark that spec_of looks for
        return method

    return mark


class Actor:
    """An object with durable state that handles one message at a time.

    Annotated fields are the state: stored with every turn, restored after a restart, refused at commit if
    they cannot be stored. Names that start with an underscore and ``ClassVar`` are not state. Other
    attributes cannot be set, so nothing is lost by accident. A field that is stored and not annotated (any
    more) is kept unread; it is there again when the annotation is, and ``migrate_from`` may drop it.

    Class attributes:
        kind: first part of the address; default: the class name in lower case. Stored: keep it stable.
        state_version: raise it when the meaning of stored fields changes, and add a classmethod
            ``migrate_from(version, state: dict) -> dict``.
        topics: topics that every actor of the class hears from the moment it is spawned.
        supervision: see :class:`Supervision`.
    """

    kind: ClassVar[str]
    state_version: ClassVar[int] = 1
    topics: ClassVar[tuple[str, ...]] = ()
    supervision: ClassVar[Supervision] = Supervision()

    _spec: ClassVar[ActorSpec | None] = None
    _locals: ClassVar[dict[str, Any] | None] = None
    _id: str
    _turn: Turn | None
    _turns: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} defines __init__, but hosts make actors: use on_start or on_spawn"
            )
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__.lower()
        cls._spec = None
        # Names that annotations refer to may be local to the function that defines the class.
        frame = sys._getframe(1)
        cls._locals = dict(frame.f_locals) if frame.f_locals is not frame.f_globals else None
        _check_reserved(cls)

    @classmethod
    def _check_class(cls) -> None:
        """Refuse class attributes that the host could not work with; raises ``TypeError``."""
        name = cls.__name__
        try:
            check_kind(cls.kind)
        except InvalidAddress as exc:
            raise TypeError(f"{name}: {exc.message}; set kind = ... on {name}") from exc
        if not isinstance(cls.supervision, Supervision):
            raise TypeError(
                f"{name}.supervision is {cls.supervision!r}: it must be a Supervision(...), "
                "such as Supervision(max_tries=3)"
            )
        version: Any = cls.state_version
        if not isinstance(version, int) or isinstance(version, bool):
            raise TypeError(f"{name}.state_version is {version!r}: it must be a whole number")
        try:
            for topic in _topics(cls):
                check_topic(topic)
        except (TypeError, InvalidAddress) as exc:
            raise TypeError(f"{name}.topics is {cls.topics!r}: it must be names of topics ({exc})") from exc

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or isinstance(getattr(type(self), name, None), property)
        if not own and name not in spec_of(type(self)).schema.names:
            raise AttributeError(
                f"{type(self).__name__} has no state field {name!r}: annotate it in the class to store it, "
                f"or start its name with an underscore if it may be lost"
            )
        object.__setattr__(self, name, value)

    # -- who and when ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The address, ``kind/key``."""
        return self._id

    @property
    def key(self) -> str:
        """The second part of the address."""
        return self._id.partition("/")[2]

    @property
    def turns(self) -> int:
        """How many turns this actor has committed."""
        return self._turns

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same when this turn is tried again."""
        return self._now_turn().random

    def now(self) -> float:
        """The host's clock: seconds since 1970."""
        return self._now_turn().now()

    # -- hooks ----------------------------------------------------------------------------------------

    async def on_spawn(self) -> None:
        """The first turn of the actor's life; its effects are committed like those of any turn."""

    async def on_start(self) -> None:
        """Called whenever the actor comes into memory, in the turn of its first message.

        The place for things that are not stored (underscore attributes). Effects commit with the turn.
        """

    async def on_stop(self) -> None:
        """Called before the actor leaves memory, outside of any turn: no effects here."""

    # -- effects --------------------------------------------------------------------------------------

    async def tell(self, to: str, message: msgspec.Struct) -> None:
        """Send a message when this turn commits.

        Raises:
            InvalidAddress, MessageTooLarge, InvalidRequest: at once.
            NoSuchActor: nobody serves this kind of address, and nobody is expected to; see ``Host(peers=)``.
            MailboxFull: this actor has too many messages on their way that no receiver takes.
        """
        await self._now_turn().tell(to, message)

    async def ask(self, to: str, request: Request[T], *, timeout: float = 60.0) -> T:
        """Ask another actor and wait for its answer, within this turn.

        The asked actor's effects are its own: they stay even if this turn fails. If this turn is tried
        again, the same question has the same id and is answered from what was committed.

        Raises:
            CycleError: the asked actor already waits for this one; the chain is named.
            DeadlineExceeded: no answer within ``timeout`` seconds.
            NoSuchActor, ActorStopped, ActorFailed, MailboxFull, MessageTooLarge: as the names say.
        """
        answer: T = await self._now_turn().ask(to, request, timeout=timeout)
        return answer

    async def publish(self, topic: str, message: msgspec.Struct) -> None:
        """Publish a message when this turn commits. The publisher does not hear it itself.

        A topic begins with its first message. There may be 50,000 (``offbook.bus.topics.TOPICS``): a message
        that would begin one more becomes a dead letter. So put ids into messages, not into names of topics.
        """
        self._now_turn().publish(topic, message)

    async def subscribe(self, topic: str) -> None:
        """Hear what is published on a topic after this turn commits. Durable; harmless to repeat."""
        await self._now_turn().subscribe(topic)

    async def unsubscribe(self, topic: str) -> None:
        """Hear a topic no more, from the commit of this turn."""
        self._now_turn().unsubscribe(topic)

    def after(self, delay: Seconds, message: msgspec.Struct, *, name: str | None = None) -> str:
        """Send ``message`` to this actor after ``delay`` seconds of the host's clock. Durable, fires once.

        Returns the timer's name, for :meth:`cancel`. A timer of the same name is replaced.
        """
        spec = spec_of(type(self))
        if tag_of(message) not in spec.handlers:
            raise InvalidRequest(f"{type(self).__name__} has no handler for {tag_of(message)!r}")
        length = seconds(delay)
        if not 0 <= length <= MAX_DELAY_SECONDS:
            raise InvalidRequest(
                f"a delay is zero to {MAX_DELAY_SECONDS:.0f} seconds (a hundred years), got {length}"
            )
        return self._now_turn().after(length, message, name)

    def cancel(self, timer: str) -> None:
        """Cancel a timer by name; unknown names are ignored (it may have fired just now)."""
        self._now_turn().cancel(timer)

    def _now_turn(self) -> Turn:
        turn = self._turn
        if turn is None or turn.closed:
            raise InvalidRequest(
                f"{self.id} acts outside of a turn; send messages and change timers only in handlers, "
                f"and let nothing that a handler starts outlive it"
            )
        return turn


_RESERVED = ("kind", "state_version", "topics", "supervision", "salt")


def _check_reserved(cls: type[Actor]) -> None:
    """A state field must not hide a method of ours."""
    for name in inspect.get_annotations(cls):
        if name in _RESERVED or name.startswith("_"):
            continue
        for base in cls.__mro__[1:]:
            if base.__module__.startswith("offbook.actors.") and name in base.__dict__:
                raise TypeError(
                    f"{cls.__name__}.{name}: this name belongs to {base.__name__}; choose another one"
                )


def _hints(cls: type, owner: Any) -> dict[str, Any]:
    local: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        local |= base.__dict__.get("_locals") or {}
        local[base.__name__] = base
    try:
        return get_type_hints(owner, localns=local)
    except NameError as exc:
        raise TypeError(
            f"{cls.__name__}: an annotation refers to {exc.name!r}, which is not known at run time; "
            f"import it outside of TYPE_CHECKING"
        ) from exc


def _state_fields(cls: type[Actor]) -> tuple[dict[str, Any], dict[str, Any]]:
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("offbook.actors.") or base is object:
            continue
        own = inspect.get_annotations(base)
        if not own:
            continue
        stored = {n: text for n, text in own.items() if not n.startswith("_") and n not in _RESERVED}
        holder = type("Fields", (), {"__annotations__": stored, "__module__": base.__module__})
        for name, hint in _hints(cls, holder).items():
            if hint is not ClassVar and get_origin(hint) is not ClassVar:
                fields[name] = hint
    for name in fields:
        if hasattr(cls, name):
            defaults[name] = getattr(cls, name)
    return fields, defaults


def _message_classes(cls: type[Actor], name: str, method: Any) -> list[type[msgspec.Struct]]:
    where = f"{cls.__name__}.{name}"
    if not inspect.iscoroutinefunction(method):
        raise TypeError(f"{where} must be an async method (async def)")
    arguments = list(inspect.signature(method).parameters)
    hints = _hints(cls, method)
    if len(arguments) != 2 or arguments[1] not in hints:
        raise TypeError(f"{where} must take one annotated message: async def {name}(self, msg: SomeMessage)")
    hint = hints[arguments[1]]
    found = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, msgspec.Struct)):
            raise TypeError(f"{where}: {one!r} is not a message class; derive it from Message or Request[T]")
    return list(found)


def _topics(cls: type[Actor]) -> tuple[str, ...]:
    return (cls.topics,) if isinstance(cls.topics, str) else tuple(cls.topics)


def address_of(spec: ActorSpec, key: str) -> str:
    """The address of one actor of a class.

    Raises:
        InvalidAddress: the key is not legal.
    """
    if not isinstance(key, str):
        raise InvalidAddress(f"the key of a {spec.kind} must be text, got {key!r:.100}")
    return str(parse_address(f"{spec.kind}/{key}"))


def spec_of(cls: type[Actor]) -> ActorSpec:
    """What a class definition means. Checked once; the result is kept on the class.

    Raises:
        TypeError: not a class of actors, a class attribute of a wrong type, a handler that is not async or
            takes no message class, or a message that two handlers take.
    """
    known: ActorSpec | None = getattr(cls, "_spec", None)
    if known is not None and known.cls is cls:
        return known
    if not isinstance(cls, type) or not issubclass(cls, Actor) or cls is Actor:
        raise TypeError(f"{cls!r:.100} is no class of actors: give a class derived from Actor or Agent")
    cls._check_class()
    kind = cls.kind
    handlers: dict[str, Handler] = {}
    ticks: dict[str, float] = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if getattr(method, "__offbook_on__", False):
            for message in _message_classes(cls, name, method):
                tag = tag_of(message)
                if tag in handlers:
                    raise TypeError(f"{cls.__name__}: {handlers[tag].name} and {name} both take {tag!r}")
                reply = reply_type(message)
                try:
                    check_type(message)
                    check_type(reply)
                except TypeError as exc:
                    raise TypeError(f"{cls.__name__}.{name}: {tag!r} cannot be sent: {exc}") from exc
                handlers[tag] = Handler(name, message, reply)
        period = getattr(method, "__offbook_every__", None)
        if period is not None:
            if not inspect.iscoroutinefunction(method) or len(inspect.signature(method).parameters) != 1:
                raise TypeError(f"{cls.__name__}.{name}: an @every method is async and takes only self")
            ticks[name] = period
    fields, defaults = _state_fields(cls)
    spec = ActorSpec(
        kind=kind,
        cls=cls,
        schema=StateSchema(kind, fields, defaults, cls.state_version, getattr(cls, "migrate_from", None)),
        handlers=handlers,
        ticks=ticks,
        topics=_topics(cls),
        supervision=cls.supervision,
        has_first_turn=cls.on_spawn is not Actor.on_spawn or cls.on_start is not Actor.on_start,
    )
    cls._spec = spec
    return spec


def make(spec: ActorSpec, actor_id: str, turns: int, state: msgspec.Struct) -> Actor:
    """An instance with its state, as the host keeps it in memory."""
    actor = object.__new__(spec.cls)
    object.__setattr__(actor, "_id", actor_id)
    object.__setattr__(actor, "_turn", None)
    object.__setattr__(actor, "_turns", turns)
    spec.schema.install(actor, state)
    return actor


def turn_random(seed: int, actor_id: str, message_id: str) -> random.Random:
    """The random numbers of one turn: the same for every try of it."""
    return random.Random(derive_id(seed, actor_id, message_id))


def unknown_type(spec: ActorSpec, tag: str) -> str:
    """The text of an UnknownMessageType error."""
    if not tag:
        return f'the message has no "type"; {spec.kind} takes {names(spec.handlers)}'
    shown = tag if re.fullmatch(r"[\w.\-]{1,64}", tag) else repr(tag[:64])
    return f"{spec.kind} takes no message of type {shown}; it takes {names(spec.handlers)}"

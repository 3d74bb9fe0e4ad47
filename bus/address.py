"""Addresses, topics, patterns and peer names: what is legal, checked where it enters.

Owns the grammar. An address is ``kind/key``. ``kind`` is an identifier; ``key`` is any printable text
(e-mail addresses and slashes are legal), so nothing may ever be named after it on disk.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from offbook.bus.errors import InvalidAddress

MAX_KEY_BYTES = 512
MAX_TOPIC_BYTES = 512
WILDCARD = "*"

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


class Address(NamedTuple):
    """A parsed actor address; ``str()`` gives the text back."""

    kind: str
    key: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.key}"


def check_kind(kind: str) -> str:
    """``kind`` if it can be the kind of an address; raises ``InvalidAddress``."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidAddress(f"kind {_shown(kind)}: must be a letter, then up to 63 of A-Za-z0-9_.-")
    return kind


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({len(shown)} characters)"


def _split(text: str, what: str) -> Address:
    if not isinstance(text, str):
        raise InvalidAddress(f"{what} must be text like 'villager/ann', got {type(text).__name__}")
    kind, slash, key = text.partition("/")
    if not slash:
        raise InvalidAddress(f"{what} {_shown(text)} has no '/': write it as 'kind/key'")
    if not _KIND.fullmatch(kind):
        raise InvalidAddress(
            f"{what} {_shown(text)}: the kind before the '/' must be a letter, then up to 63 of A-Za-z0-9_.-"
        )
    _check_text(key, f"the key of {what} {_shown(text)}", MAX_KEY_BYTES)
    return Address(kind, key)


def _check_text(text: str, what: str, limit: int) -> None:
    if not text:
        raise InvalidAddress(f"{what} is empty")
    if len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit:
        raise InvalidAddress(f"{what} is longer than {limit} bytes of UTF-8")
    if not text.isprintable():
        raise InvalidAddress(f"{what} holds characters that cannot be printed")


@lru_cache(maxsize=16384)
def parse_address(text: str) -> Address:
    """Parse ``kind/key``.

    Raises:
        InvalidAddress: naming the part that is wrong. The key ``*`` is reserved for patterns.
    """
    address = _split(text, "address")
    if address.key == WILDCARD:
        raise InvalidAddress(f"address {_shown(text)}: the key '*' is a pattern, not an actor")
    return address


def parse_pattern(text: str) -> Address:
    """Parse what a peer serves: one address, or ``kind/*`` for all keys of a kind.

    Raises:
        InvalidAddress: as :func:`parse_address`.
    """
    return _split(text, "pattern")


@lru_cache(maxsize=4096)
def check_topic(topic: str) -> str:
    """Return ``topic`` if it is 1 to 512 bytes of printable text, else raise ``InvalidAddress``."""
    if not isinstance(topic, str):
        raise InvalidAddress(f"a topic must be text, got {type(topic).__name__}")
    _check_text(topic, f"topic {_shown(topic)}", MAX_TOPIC_BYTES)
    return topic


def check_name(name: str, what: str = "name") -> str:
    """Return ``name`` if it can name a peer or a runtime, else raise ``InvalidAddress``.

    A name is 1 to 128 of ``A-Z a-z 0-9 _ . -`` and starts with none of ``.`` and ``-``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidAddress(
            f"{what} {_shown(name)} must be 1 to 128 of A-Z a-z 0-9 _ . - (not starting with . or -)"
        )
    return name

"""The bus: typed messages between processes on one machine or several.

``connect`` gives a client to any process; ``Broker`` is what clients connect to. Neither knows of
actors or models. PROTOCOL.md, beside this file, specifies the bytes.
"""

from offbook.bus.address import Address, check_topic, parse_address, parse_pattern
from offbook.bus.body import decode_as, decode_body, encode_body, type_name
from offbook.bus.broker import Broker
from offbook.bus.client import Bus, connect
from offbook.bus.curve import KeyPair, ServerKeys, client_keys, new_key_pair
from offbook.bus.delivery import Delivery
from offbook.bus.envelope import MAX_BODY, Envelope, Kind, new_id
from offbook.bus.security import endpoint_for, run_dir
from offbook.bus.statistics import BrokerStatistics
from offbook.bus.streams import Deliveries, ReplyStream, Subscription
from offbook.bus.topics import Event, MemoryTopicStore, Record, TopicStore

__all__ = [
    "MAX_BODY",
    "Address",
    "Broker",
    "BrokerStatistics",
    "Bus",
    "Deliveries",
    "Delivery",
    "Envelope",
    "Event",
    "KeyPair",
    "Kind",
    "MemoryTopicStore",
    "Record",
    "ReplyStream",
    "ServerKeys",
    "Subscription",
    "TopicStore",
    "check_topic",
    "client_keys",
    "connect",
    "decode_as",
    "decode_body",
    "encode_body",
    "endpoint_for",
    "new_id",
    "new_key_pair",
    "parse_address",
    "parse_pattern",
    "run_dir",
    "type_name",
]

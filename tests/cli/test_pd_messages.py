"""The channel between the parent and an engine process."""

import socket
import threading

import pytest

from interlock.pd.messages import Channel, Finished, FromEngine, Generate, ToEngine


def test_messages_arrive_whole_in_order_and_with_their_types() -> None:
    here, there = socket.socketpair()
    sender, receiver = Channel(here, FromEngine), Channel(there, ToEngine)
    messages = [Generate(f"request-{i}", list(range(i * 5000)), {"temperature": 0.5}, False, {"remote_block_ids": [1, 2]}) for i in range(8)]
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    assert [receiver.receive() for _ in messages] == messages
    thread.join()
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_logprobs_keep_every_bit() -> None:
    here, there = socket.socketpair()
    values = [-0.0, -1e-300, float("-inf"), -0.1]
    sent = Finished("r", [1], [2], "x", "stop", [[(7, value) for value in values]], {"FULL": 1}, 0.1, 5, 0.0, 0)
    Channel(here, ToEngine).send(sent)
    received = Channel(there, FromEngine).receive()
    assert [float.hex(value) for _, value in received.logprobs[0]] == [float.hex(value) for value in values]
    here.close()
    there.close()

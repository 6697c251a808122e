from paceline.core import record
from paceline.core.batch import StepResult
from paceline.core.events import Back, Cancel, Complete, Lost, Submit
from paceline.core.request import SLO, Request

RESULT = StepResult(bytearray([1, 0, 3]), [(0, "stop")], [(2, (9, 2**63))], [1])


def test_a_log_gives_back_every_bit():
    turns = [
        (0.1 + 0.2, (Submit(Request("a", 3, 4, 0.3, "m", SLO(ttft=0.1), (2**63, 5))),)),
        (0.4, (Submit(Request("b", 1, 1), admitted=True),)),
        (1e-9, ()),
        (2.5, (Complete(1, 7, RESULT), Lost(0), Lost(1, for_good=True), Back(0))),
        (3.0, (Cancel("a"),)),
    ]
    lines = [record.dump(now, inputs) for now, inputs in turns]
    assert list(record.load(lines)) == turns

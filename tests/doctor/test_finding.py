import json

from headrace.doctor.finding import Finding


def test_a_finding_is_plain_json() -> None:
    value = Finding("slow", "speed", "it is slow", ("a", "b"), "buy").to_json()
    assert json.loads(json.dumps(value)) == value
    assert value["evidence"] == ["a", "b"]

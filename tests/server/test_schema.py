"""A schemathesis run against /openapi.json: whatever it makes of the schema, valid or not, never a 5xx."""

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.server.conftest import build, make_tokenizer

SERVER = build(make_tokenizer())
ENCODER = build(make_tokenizer(), models={"mini": 4})
CONFIG = SchemathesisConfig()
CONFIG.projects.override.generation.modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
schema = schemathesis.openapi.from_dict(SERVER.app.openapi(), config=CONFIG)
schema.app = SERVER.app


embeddings = schemathesis.openapi.from_dict(ENCODER.app.openapi(), config=CONFIG)
embeddings.app = ENCODER.app
some = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@embeddings.include(path="/v1/embeddings").parametrize()
@some
def test_no_input_breaks_an_encoder(case: schemathesis.Case) -> None:
    case.call_and_validate(
        checks=[not_a_server_error, status_code_conformance, response_schema_conformance], timeout=20
    )
    assert not ENCODER.fleet.running


@schema.parametrize()
@some
def test_no_input_breaks_the_server(case: schemathesis.Case) -> None:
    case.call_and_validate(
        checks=[not_a_server_error, status_code_conformance, response_schema_conformance], timeout=20
    )
    assert not SERVER.fleet.running

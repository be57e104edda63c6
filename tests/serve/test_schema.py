"""Random requests, generated from the OpenAPI schema, never cause an internal error."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from factscope.serve.limits import ServerLimits

from serving import running_server, serving_lm

LIMITS = ServerLimits(max_jobs=50, max_jobs_per_session=50, max_edits=3, max_new_tokens=3)
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
VALID, INVALID = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
ROUTES = [
    "GET /api/about", "GET /api/queue", "GET /api/examples", "POST /api/next-tokens",
    "POST /api/suggestions", "POST /api/traces", "GET /api/traces/{name}/{file}",
    "POST /api/edits", "GET /api/edits", "DELETE /api/edits/{id}", "GET /api/edits/{ids}/{file}",
    "POST /api/predict", "GET /api/runs", "GET /api/tables", "GET /api/figures/{file}",
    "GET /api/tables/{file}", "GET /api/facts",
    "GET /api/cases", "GET /api/samples",
]  # fmt: skip


@pytest.fixture(scope="module")
def schema() -> Iterator[schemathesis.BaseSchema]:
    with running_server(serving_lm(), limits=LIMITS) as (address, _):
        yield schemathesis.openapi.from_url(f"{address}/api/openapi.json")


def test_the_schema_lists_all_routes(schema: schemathesis.BaseSchema) -> None:
    assert sorted(f"{m.upper()} {p}" for p in schema for m in schema[p]) == sorted(ROUTES)


# Routes with a body or query; only these can get an invalid request.
WITH_INPUT = ("POST", "/tables", "/figures", "/facts", "/cases", "/samples")
REQUESTS = [(route, VALID) for route in ROUTES]
REQUESTS += [(route, INVALID) for route in ROUTES if any(word in route for word in WITH_INPUT)]


@pytest.mark.parametrize(("route", "mode"), REQUESTS)
def test_no_request_causes_an_internal_error(
    schema: schemathesis.BaseSchema, route: str, mode: schemathesis.GenerationMode
) -> None:
    method, path = route.split()
    operation = schema[path][method]

    @SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=[not_a_server_error])
        assert '"kind":"ServerError"' not in response.text.replace('": "', '":"')

    send()

"""Requests made up from the server's own description: whatever comes, it does not break."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from factscope.serve.schemas import ServerLimits

from serving import listening, worded

LIMITS = ServerLimits(waiting=50, each=50, edits=3, written=3)
MANY = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
FITTING, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
ROUTES = [
    "GET /api/about", "GET /api/queue", "POST /api/locate", "GET /api/traces/{name}/{file}",
    "POST /api/edits", "GET /api/edits", "DELETE /api/edits/{id}", "GET /api/edits/{ids}/{file}",
    "POST /api/ask", "GET /api/runs", "GET /api/tables", "GET /api/figure/{which}",
    "GET /api/cases", "GET /api/samples",
]  # fmt: skip


@pytest.fixture(scope="module")
def described() -> Iterator[schemathesis.BaseSchema]:
    with listening(worded(), limits=LIMITS) as (address, _):
        yield schemathesis.openapi.from_url(f"{address}/api/openapi.json")


def test_every_route_is_described(described: schemathesis.BaseSchema) -> None:
    assert sorted(f"{m.upper()} {p}" for p in described for m in described[p]) == sorted(ROUTES)


# Where a route takes no more than words in its path, nothing can be wrong with a request.
TAKES = ("POST", "/tables", "/figure", "/cases", "/samples")
REQUESTS = [(route, FITTING) for route in ROUTES]
REQUESTS += [(route, WRONG) for route in ROUTES if any(word in route for word in TAKES)]


@pytest.mark.parametrize(("route", "mode"), REQUESTS)
def test_no_request_breaks_it(
    described: schemathesis.BaseSchema, route: str, mode: schemathesis.GenerationMode
) -> None:
    method, path = route.split()
    operation = described[path][method]

    @MANY
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        answer = case.call(timeout=60)
        case.validate_response(answer, checks=[not_a_server_error])
        assert "ServerError" not in answer.text

    send()

"""Wikidata: the subjects that have an object in a relation, by one SPARQL query each."""

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from factscope.errors import BadSetting, DownloadFailed
from factscope.extras.counterfact_builder import SubjectsWithObject
from factscope.io import parse_json, write_atomic

ENDPOINT = "https://query.wikidata.org/sparql"
HEADERS = {
    "User-Agent": "factscope/0.1 (data sets of counterfactuals; Python urllib)",
    "Accept": "application/sparql-results+json",
}
TIMEOUT = 60  # seconds without data after which a request fails
TRIES = 3
RETRY = (429, 500, 502, 503, 504)  # HTTP status codes after which the request is repeated
LIMIT = 200  # number of subjects to request; ten of them are drawn


def sparql_query(relation: str, target: str) -> str:
    """SPARQL for the subjects that have the object, which is found by its English label."""
    if not re.fullmatch(r"P[1-9]\d*", relation):
        raise BadSetting(f"{relation!r} is not a property of Wikidata, such as P19")
    # A JSON string is a valid SPARQL string, except for "\/", which json does not write.
    label = json.dumps(target, ensure_ascii=False)
    return (
        "SELECT DISTINCT ?object ?subject ?name WHERE { "
        f"?object rdfs:label {label}@en . "
        f"?subject wdt:{relation} ?object . "
        '?subject rdfs:label ?name . FILTER(LANG(?name) = "en") '
        f"}} LIMIT {LIMIT}"
    )


def http_get(url: str) -> bytes:
    """The response to a request; repeats it if the service is busy."""
    request = urllib.request.Request(url, headers=HEADERS)
    for tries_left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code not in RETRY or not tries_left:
                raise DownloadFailed(
                    f"Wikidata answered {error.code} {error.reason}; try again later: the "
                    "responses so far are cached"
                ) from error
            wait = error.headers.get("Retry-After", "")
            time.sleep(min(int(wait), TIMEOUT) if wait.isdigit() else 5)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(
                f"could not query Wikidata ({error}); check the network, or leave out --wikidata "
                "to take neighbours from the table"
            ) from error
    raise AssertionError("the last try returns or raises")


def subjects_in_wikidata(
    relation: str, target: str, folder: Path, get: Callable[[str], bytes] = http_get
) -> SubjectsWithObject:
    """The subjects that have the object, by English name; responses are cached in the folder."""
    query = sparql_query(relation, target)
    path = folder / f"{hashlib.sha256(query.encode()).hexdigest()[:32]}.json"
    cached = path.is_file()
    url = f"{ENDPOINT}?{urllib.parse.urlencode({'query': query})}"
    response = path.read_bytes() if cached else get(url)
    try:
        rows = parse_json(response)["results"]["bindings"]
        names = {row["name"]["value"] for row in rows}
        ids = Counter(row["object"]["value"].rsplit("/", 1)[-1] for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        start = response[:60].decode(errors="replace")
        raise DownloadFailed(f"Wikidata's answer cannot be read: {start!r}; try again") from error
    if not cached:
        write_atomic(path, response)
    # Several entities can share a label: take the one with the most subjects.
    most_frequent = max(sorted(ids), key=lambda i: ids[i], default=None)
    # Sorted, because the order of Wikidata's rows varies.
    return SubjectsWithObject(subjects=tuple(sorted(names)), object_id=most_frequent)

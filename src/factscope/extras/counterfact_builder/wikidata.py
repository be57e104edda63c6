"""Wikidata: which entities have an object in a relation, by one SPARQL query each."""

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
from dataclasses import dataclass
from pathlib import Path

from factscope.errors import BadSetting, DownloadFailed
from factscope.extras.counterfact_builder.build import Holders
from factscope.io import write_atomic

__all__ = ["Send", "Wikidata", "query", "send"]

ENDPOINT = "https://query.wikidata.org/sparql"
AGENT = "factscope/0.1 (data sets of counterfactuals; Python urllib)"
TIMEOUT = 60
"""Seconds without an answer after which the service counts as gone."""
TRIES = 3
BUSY = (429, 500, 502, 503, 504)
"""Answers after which it is worth asking again."""
MOST = 200
"""Entities that are asked for, of which ten are drawn."""

Send = Callable[[str], bytes]
"""An address → what is found there."""


def query(relation: str, target: str, most: int = MOST) -> str:
    """SPARQL for the entities that have the object, found by its English name."""
    if not re.fullmatch(r"P[1-9]\d*", relation):
        raise BadSetting(f"{relation!r} is not a property of Wikidata, such as P19")
    # A JSON string is a SPARQL string, but for "\/", which json does not write.
    name = json.dumps(target, ensure_ascii=False)
    return (
        "SELECT DISTINCT ?object ?subject ?name WHERE { "
        f"?object rdfs:label {name}@en . "
        f"?subject wdt:{relation} ?object . "
        '?subject rdfs:label ?name . FILTER(LANG(?name) = "en") '
        f"}} LIMIT {most}"
    )


def send(address: str) -> bytes:
    """What is found at an address; asks again where the service is busy."""
    request = urllib.request.Request(
        address, headers={"User-Agent": AGENT, "Accept": "application/sparql-results+json"}
    )
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code not in BUSY or not left:
                raise DownloadFailed(
                    f"Wikidata answered {error.code} {error.reason}; try again later: what it "
                    "has answered so far is kept"
                ) from error
            wait = error.headers.get("Retry-After", "")
            time.sleep(min(int(wait), TIMEOUT) if wait.isdigit() else 5)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(
                f"could not ask Wikidata ({error}); check the network, or leave out --wikidata "
                "to take neighbours from the table"
            ) from error
    raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class Wikidata:
    """Asks Wikidata; each answer is kept in the folder and not asked for again."""

    folder: Path
    send: Send = send

    def holders(self, relation: str, target: str) -> Holders:
        """The entities that have the object, by name, and the object's own id."""
        asked = query(relation, target)
        kept = self.folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
        if kept.is_file():
            return _parsed(kept.read_bytes())
        answer = self.send(f"{ENDPOINT}?{urllib.parse.urlencode({'query': asked})}")
        found = _parsed(answer)
        write_atomic(kept, answer)
        return found


def _parsed(answer: bytes) -> Holders:
    """Names in alphabetical order, since Wikidata gives them in any."""
    try:
        rows = json.loads(answer)["results"]["bindings"]
        names = {row["name"]["value"] for row in rows}
        ids = Counter(row["object"]["value"].rsplit("/", 1)[-1] for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        shown = answer[:60].decode(errors="replace")
        raise DownloadFailed(f"Wikidata's answer cannot be read: {shown!r}; try again") from error
    likeliest = max(sorted(ids), key=lambda i: ids[i], default=None)
    return Holders(names=tuple(sorted(names)), id=likeliest)

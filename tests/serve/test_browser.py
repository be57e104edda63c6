"""The page in Chromium on a desktop (1280 px, light) and a phone (390 px, dark).

Screenshots of both in both themes are in build/screenshots.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from factscope import Fact, trace
from factscope.analysis.attribution import compare_attribution, over_all_layers
from factscope.editing.edit import Edit
from factscope.evaluation import before_after
from factscope.lm.generate import top_next_tokens
from factscope.lm.model import LM
from factscope.records import PromptChange, TraceRecord
from factscope.report.labels import display_token
from factscope.serve.schemas import default_tracing
from factscope.serve.sessions import ServerState
from factscope.tracing.stream import CellUpdate

from served_page import WIDTHS, Page
from served_records import endless_traces
from serving import CITY, TOWER


def probabilities(page: Page, number: int) -> tuple[float, float]:
    """P(new) of an edit's fact, unedited and with the selected edits."""
    before, after = page.texts("#edits small")[number].rpartition(") ")[2].split(" → ")
    return float(before.strip("\u00a0%<")), float(after.strip("\u00a0%<"))


def test_the_page_opens_with_a_finished_trace(page: Page, server: tuple[str, ServerState]) -> None:
    assert page.traced()
    assert page.text("#caption").startswith(CITY)
    assert page.text("#caption .subject") == TOWER
    guide = " ".join(page.text("#trace-result .lead").split())
    assert guide.count(". ") + 1 == 3, guide  # sentences on how to read it
    assert all("highest at" in text for text in page.texts("#heatmaps output"))
    page.write_prompt("The Louvre is in", "The Louvre")  # not traced
    assert "".join(page.texts("#tokens button")) == "The Louvre is in"
    expected = top_next_tokens(server[1].lm, "The Louvre is in", 5)
    assert page.texts("#next b") == [display_token(token) for token, _ in expected]


def test_trace(page: Page) -> None:
    page.screenshot("start")
    page.write_prompt(CITY, "Eiffel Tower")
    page.trace()
    assert len(page.all("#heatmaps .heat")) == 3
    assert page.js(
        "[...document.querySelectorAll('#heatmaps output')]"
        ".every((output) => /layer/.test(output.textContent))"
    )
    cells = page.find("#heatmaps .cells")
    cells.send_keys(Keys.ARROW_UP, Keys.ARROW_RIGHT)
    read = page.text("#heatmaps output")
    assert "layer 1" in read
    assert "effect" in read
    page.click("#sever")
    page.until(lambda: page.all("#severed .curve.attn"))
    page.click("#integrate")
    page.until(lambda: "layer" in "".join(page.texts("#gradients output")))
    page.until(lambda: page.idle)
    top = page.text("#gradients .scale span:last-child")
    assert top.startswith("≥ ")  # the highest value does not set the scale
    assert float(top[2:]) < float(page.text("#gradients output").rpartition(": ")[2])
    page.screenshot("trace")


def scale_ends(page: Page) -> list[tuple[str, str]]:
    """First and last label of the color scale of each restored map."""
    ends = page.texts("#heatmaps .scale span:not(:first-child)")
    return list(zip(ends[::2], ends[1::2], strict=True))


def highest(page: Page) -> list[str]:
    """The highest value of each restored map."""
    return [text.rpartition(": ")[2] for text in page.texts("#heatmaps output")]


def test_maps_have_one_scale_or_one_each(page: Page) -> None:
    clean, corrupted = page.texts("#baseline dd")[1:3]
    values = [float(text.strip("\u00a0%")) for text in (clean, *highest(page))]
    top = f"{max(values):.1f}\u00a0%"
    assert scale_ends(page) == [(corrupted, top)] * 3
    page.click("#shared-scale")
    assert scale_ends(page) == [(corrupted, value) for value in highest(page)]
    units = page.texts("#heatmaps .scale span:first-child")
    assert units == [f"p({page.text('#baseline dd')})"] * 3
    names = page.texts("#heatmaps .axis-name")
    window = "layer in the middle of the window"
    assert names == ["token", "layer", "token", window, "token", window]


def test_the_logit_lens_shows_what_each_state_predicts(
    page: Page, server: tuple[str, ServerState]
) -> None:
    fact, lm = Fact(subject=TOWER, prompt="{} is located in the city of"), server[1].lm
    settings = replace(default_tracing(server[1].limits), lens=True)
    record = trace(lm, fact, settings)
    page.until(lambda: page.all("#lens .cells") and page.idle)
    for run in ("clean", "corrupted"):
        Select(page.find("#lens-run")).select_by_value(run)
        expected = [[cell[0][0] for cell in row] for row in record.lens[run].top]
        words = page.texts("#lens .words span")
        assert words == [display_token(word) for row in expected for word in row]
        cells = page.find("#lens .cells")
        cells.send_keys(Keys.ARROW_DOWN)  # the last token, layer 0
        top = record.lens[run].top[-1][0]
        shown = [text.rpartition(" ")[0] for text in page.texts("#lens .likely li")]
        assert shown == [display_token(token) for token, _ in top]
        assert f"{100 * (record.lens[run].answer[-1][0] or 0):.1f}" in page.text("#lens output")
        page.js("document.activeElement.blur()")
    assert page.find("#lens .words").is_displayed()


def test_the_metric_and_the_direction_are_named_and_drawn(page: Page) -> None:
    page.write_prompt(CITY, TOWER)
    page.js("document.querySelector('#trace-form details').open = true")
    assert not page.find("#foil").is_displayed()
    Select(page.find("[name=metric]")).select_by_value("logit-difference")
    Select(page.find("[name=direction]")).select_by_value("corrupt")
    page.find("#foil").send_keys("Rome")
    page.trace()
    assert page.text("#heatmaps h3") == "Corrupted: a single state"
    assert "in the clean run is set to its value in the corrupted run" in page.text("#intervention")
    [label, *_] = page.texts("#heatmaps .scale span:first-child")
    assert label.startswith("logit(")
    assert label in page.text("#intervention")
    numbers = dict(zip(page.texts("#baseline dt"), page.texts("#baseline dd"), strict=True))
    clean, corrupted = (numbers[f"{label}, {run} run"] for run in ("clean", "corrupted"))
    assert {start for start, _ in scale_ends(page)} == {clean}
    assert page.text("#heatmaps output").startswith("lowest at")
    cells = page.find("#heatmaps .cells")
    cells.send_keys(Keys.ARROW_DOWN)
    value, effect = page.text("#heatmaps output").rpartition(" · ")[2].split(", effect ")
    assert float(value) + float(effect) == pytest.approx(float(clean), abs=0.011)
    page.click("#normalised")
    assert {start for start, _ in scale_ends(page)} == {"1.00"}
    assert page.text("#heatmaps .scale span:first-child") == f"normalised {label}"
    assert "figure.png?normalise=true" in page.js("document.querySelector('#trace-files a').href")
    page.click("#normalised")
    assert corrupted != clean
    page.open(page.js("location.hash"))
    page.until(page.traced)
    assert page.find("#foil").get_attribute("value") == "Rome"
    assert page.text("#heatmaps .scale span:first-child") == label


def test_heads_knockout_and_attribution(page: Page, server: tuple[str, ServerState]) -> None:
    settings = replace(
        default_tracing(server[1].limits), heads=True, knockout=True, attribution="atp"
    )
    fact = Fact(subject=TOWER, prompt="{} is located in the city of")
    record = trace(server[1].lm, fact, settings)
    page.click("#restore-heads")
    page.until(lambda: page.all("#heads .cells") and page.idle)
    assert page.text("#heads-tokens [aria-pressed=true]") == "of"
    for token in (-1, record.subject[0]):
        label = page.texts("#heads-tokens button")[token]
        page.click(f"#heads-tokens button:nth-child({token % len(record.tokens) + 1})")
        page.until(lambda: page.all("#heads .cells") and page.idle)
        assert page.text("#heads h3") == f"Restored: a single head at “{label}”"
        assert len(page.all("#heads .tokens li")) == server[1].lm.n_heads
        page.find("#heads .cells").send_keys(Keys.ARROW_RIGHT)  # the last head, layer 1
        value = record.heads[-1][token][1]
        assert value is not None
        assert f"layer 1 · {100 * value:.1f}\u00a0%, effect" in page.text("#heads output")
    page.click("#knock-out")
    page.until(lambda: page.all("#knockout .curve") and page.idle)
    names = ["subject tokens", "relation tokens", "last token"]
    assert page.texts("#knockout .legend span") == names
    page.find("#knockout .plot").send_keys(Keys.ARROW_RIGHT)
    change = 100 * (record.knockout["subject"][1] / record.clean - 1)
    assert f"layer 1 · subject tokens {change:.1f}\u00a0%" in page.text("#knockout output")
    page.click("#estimate")
    page.until(lambda: page.all("#attribution .cells") and page.idle)
    assert page.texts("#attribution h3") == ["Measured: states", "AtP estimate: states"]
    [graded, *_] = over_all_layers(compare_attribution([record]))
    shown = page.texts("#attribution dd")
    assert shown[0] == f"{graded.pearson.mean:.2f}"
    assert shown[2] == f"{10 * graded.missed.mean:.0f} of 10"
    Select(page.find("#attribution-kind")).select_by_value("mlp")
    assert page.texts("#attribution h3") == ["Measured: MLP", "AtP estimate: MLP"]
    page.click("#normalised")
    assert page.text("#attribution .scale span:first-child").startswith("normalised")
    assert page.text("#knockout text").startswith("change of normalised")
    page.click("#normalised")
    assert page.accessibility_problems() == []
    scale = "((e) => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
    assert page.js(f"{scale}(document.querySelector('#knockout svg'))") > 0.95  # readable text
    page.screenshot("attention")


def test_another_subject_and_answer(page: Page) -> None:
    page.write_prompt(CITY, TOWER)
    page.js("document.querySelector('#trace-form details').open = true")
    assert not page.find("#replacement").is_displayed()
    Select(page.find("[name=distribution]")).select_by_value("tokens")
    page.find("#replacement").send_keys("The Eiffel Tiger")
    page.find("#answer").send_keys("Rome")
    page.click("#trace-form .go")
    page.until(lambda: page.traced() or page.all("#trace-status.failed"))
    assert "tokens" in page.text("#trace-status")  # the lengths differ: an error that says so
    page.find("#replacement").clear()
    page.find("#replacement").send_keys("The Eiffel Towel")
    page.trace()
    assert "“The Eiffel Towel” takes the place of the subject" in page.text("#corruption")
    assert page.text("#baseline dd") == "Rome"
    link = page.js("location.hash")
    page.open(link)
    page.until(page.traced)
    assert page.find("#answer").get_attribute("value") == "Rome"
    assert page.find("#replacement").get_attribute("value") == "The Eiffel Towel"


def test_a_half_filled_map_has_the_scale_of_a_full_one(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = server[1].first_trace
    assert record is not None
    finish = threading.Event()

    def halted(*args: Any, progress: Any, **more: Any) -> Iterator[Any]:
        yield replace(record, clean=0.9, corrupted=0.1, restored={})
        values = ((0.2,) * server[1].lm.n_layers,)
        yield CellUpdate("restored", "mlp", (1,), tuple(range(server[1].lm.n_layers)), values, 1)
        while not finish.wait(0.01):
            progress(0.0)
        yield record

    monkeypatch.setattr("factscope.serve.routes_trace.stream_trace", halted)
    page.set("seed", str(len(page.width)))  # a trace that is not in the cache
    page.click("#trace-form .go")
    try:
        page.until(lambda: "20.0\u00a0%" in page.texts("#heatmaps output")[1])
        page.click("#shared-scale")  # no effect on maps that are not complete
        assert scale_ends(page) == [("10.0\u00a0%", "90.0\u00a0%")] * 3
    finally:
        finish.set()
    page.until(page.traced)


def test_high_values_stand_out_in_both_themes(page: Page) -> None:
    script = """const done = arguments[0]; import('/static/heatmap.js').then(({ HeatMap }) => {
        const colors = [[252, 251, 253], [158, 154, 200], [63, 0, 125]];
        const map = new HeatMap({ title: '', colors, labels: ['a'], layers: 2,
            scale: { unit: '', format: String, value: (x) => x, base: 0, sign: 1 } });
        document.body.append(map.node);
        map.updateAll([[0, 1]]);
        const { data } = map.canvas.getContext('2d').getImageData(0, 0, 2, 1);
        const paper = getComputedStyle(map.node).backgroundColor.match(/\\d+/g).map(Number);
        done([[...data.slice(0, 3)], [...data.slice(4, 7)], paper]); })"""
    for dark in (False, True):
        page.dark(dark)
        low, high, paper = page.browser.execute_async_script(script)
        assert sum(abs(a - b) for a, b in zip(low, paper, strict=True)) < 50
        assert sum(abs(a - b) for a, b in zip(high, paper, strict=True)) > 400
    words = set(page.text("main").lower().split())
    assert not words & {"dark", "darker", "bright", "brighter", "lighter"}


def test_a_doubtful_trace_is_called_so(page: Page) -> None:
    page.write_prompt(CITY, TOWER)
    page.set("noise", "0")
    page.trace()
    assert page.find("#warnings").is_displayed()
    assert "nothing is corrupted, so there is no effect" in page.text("#warnings")


def test_a_waiting_visitor_sees_the_position(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no time left: waiting is not work."""
    started = endless_traces(monkeypatch)

    def occupy(client: httpx.Client, seed: int) -> httpx.Response:
        body = {"prompt": CITY, "subject": TOWER, "settings": {"seed": seed}}
        request = client.build_request("POST", f"{server[0]}/api/traces", json=body)
        return client.send(request, stream=True)

    def status() -> str:
        return page.text("#trace-status span")

    with httpx.Client() as one, httpx.Client() as two:
        running, waiting = occupy(one, 91), occupy(two, 92)
        assert started.wait(10)
        page.set("seed", "93")
        page.click("#trace-form .go")
        page.until(lambda: status() == "position 2 in the queue")
        page.find("#prompt").send_keys(" the")
        page.until(lambda: page.text("#next") == "waiting for the model: 4 jobs in the queue")
        waiting.close()
        page.until(lambda: status() == "position 1 in the queue")
        time.sleep(1.2)  # the page updates the time left once a second
        assert status() == "position 1 in the queue"
        assert page.js("document.querySelector('#trace-status progress').value") == 0
        running.close()
        page.until(lambda: status() in ("running…", "0 %"))
        page.click("#trace-status button")
        page.until(lambda: len(page.texts("#next li")) == 5)


def test_the_time_left_does_not_count_the_time_in_the_queue(page: Page) -> None:
    script = """const done = arguments[0]; import('/static/job.js').then(({ Clock }) => {
        let now = 0; const clock = new Clock(() => now), read = [];
        now = 100; clock.start();
        now = 110; clock.advance(0.5); read.push(clock.text);
        now = 114; read.push(clock.text);
        now = 130; read.push(clock.text); done(read); })"""
    assert page.browser.execute_async_script(script) == [
        "50 %, about 10 s left",
        "50 %, about 6 s left",
        "50 %, takes longer than expected",
    ]


def test_a_job_that_waited_counts_its_time_from_its_start(page: Page) -> None:
    script = """const done = arguments[0]; import('/static/job.js').then(async ({ Job }) => {
        let now = 0; performance.now = () => 1000 * now;
        const job = new Job(document.createElement('div')), read = [];
        const send = async (stream, at, event) => {
            now = at;
            stream.enqueue(new TextEncoder().encode(JSON.stringify(event) + '\\n'));
            await new Promise((passed) => setTimeout(passed, 100));
            read.push(job.node.querySelector('span').textContent); };
        window.fetch = async () => new Response(new ReadableStream({ async start(stream) {
            await send(stream, 0, { event: 'queued', position: 3 });
            await send(stream, 50, { event: 'queued', position: 1 });
            await send(stream, 100, { event: 'queued', position: 0 });
            await send(stream, 110, { event: 'progress', fraction: 0.5 });
            stream.close(); } }));
        await job.run('/', {}, () => {}); done(read); })"""
    assert page.browser.execute_async_script(script) == [
        "position 3 in the queue",
        "position 1 in the queue",
        "running…",
        "50 %, about 10 s left",
    ]


def test_invisible_characters_are_shown(page: Page) -> None:
    fact = {"prompt": "The \u202etower\u200b is in", "subject": "\u202etower\u200b"}
    page.open("#/trace/" + quote(json.dumps(fact)))
    page.trace()
    page.until(lambda: "\ufffdtower\ufffd" in "".join(page.texts("#tokens button")))
    page.click("nav [data-view=edit]")
    page.click("#layers button:nth-child(2)")
    page.edit("Ro\u202eme")
    for text in (page.text("#caption"), page.text("#edits"), page.text("#edit-details")):
        assert "\ufffdtower\ufffd" in text
    assert "Ro\ufffdme" in page.text("#edits")
    hidden = "[...document.querySelectorAll('main *')].some((e) => /[\\u202e\\u200b]/.test("
    assert not page.js(f"{hidden}[e.title, e.ariaLabel, e.alt].join()))")


def test_hovering_shows_the_value_of_a_cell(page: Page) -> None:
    page.trace()
    cells = page.find("#heatmaps .cells")
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).perform()
    assert "· layer 1 ·" in page.text("#heatmaps output")


def test_edits_can_be_switched_off(page: Page) -> None:
    page.trace()
    cells = page.all("#heatmaps .cells")[1]
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).click().perform()  # the middle: layer 1
    page.until(lambda: page.find("#view-edit").is_displayed())
    assert page.text("#layers [aria-checked=true]").strip() == "1"
    page.edit("Rome")
    before, after = probabilities(page, 0)
    assert after > before
    page.edit("London")
    field = page.find("#predict-form input")
    field.send_keys(CITY, Keys.ENTER)
    page.until(lambda: page.all("#prediction .both"))
    page.until(page.updated)
    page.screenshot("edit")
    for number in (1, 2):  # with the keyboard; the focus stays on the switch
        page.js(f"document.querySelector('#edits li:nth-child({number}) input').focus()")
        ActionChains(page.browser).send_keys(Keys.SPACE).perform()
        page.until(page.updated)
        assert page.js("document.activeElement.dataset.key") == f"switch {number}"
    for number in range(2):
        before, after = probabilities(page, number)
        assert after == before
    assert page.all("#prediction mark.diff") == []
    page.click("#edits li:nth-child(1) input")
    page.until(lambda: probabilities(page, 0)[1] > probabilities(page, 0)[0])


def test_an_edit_is_judged_and_changed_neighbours_are_marked(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.js("document.querySelector('#edit-form details:last-of-type').open = true")
    page.click("#suggest")
    page.until(lambda: page.js("document.querySelector('[name=generations]').value"))
    neighbours = page.js("document.querySelector('[name=neighbours]').value").splitlines()
    generations = page.js("document.querySelector('[name=generations]').value").splitlines()
    assert len(neighbours) > 2
    assert len(generations) > 1
    page.edit("Rome")
    verdicts = {"took", "did not take", "damaged others", "did not take and damaged others"}
    assert page.text(".verdict").partition(", but only")[0].rstrip(".") in {
        f"The edit {verdict}" for verdict in verdicts
    }
    assert page.text("#edits .tag") in page.text(".verdict")
    changed = len(page.all(".dumbbell .tag.bad"))
    assert page.texts("#edit-details dd")[-1] == f"{changed} of {len(neighbours)}"
    assert page.texts("#edit-details .opening") == [f"{text} …" for text in generations]
    page.click("#retrace-button")
    page.until(lambda: len(page.all("#retrace .heats")) == 2)
    titles = page.texts("#retrace h3:not(.heat h3)")
    assert [title.partition(":")[0] for title in titles] == ["Unedited model", "With this edit"]
    page.until(lambda: page.idle)
    page.screenshot("judged")


@pytest.mark.parametrize("flipped", [0, 2])
def test_changed_neighbours_are_damage(
    page: Page, monkeypatch: pytest.MonkeyPatch, flipped: int
) -> None:
    score = before_after._score

    def flip(lm: LM, edit: Edit, prompts: Sequence[Any]) -> tuple[list[PromptChange], list[bool]]:
        changes, taken = score(lm, edit, prompts)
        neighbours = [i for i, change in enumerate(changes) if change.kind == "neighbour"]
        for i in neighbours:
            before = changes[i].before
            top = " else" if i in neighbours[:flipped] else before.top
            changes[i] = replace(changes[i], after=replace(changes[i].after, top=top))
        return changes, taken

    monkeypatch.setattr(before_after, "_score", flip)
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    assert page.texts("#edit-details dd")[-1] == f"{flipped} of 6"
    neighbours = page.all(".dumbbells:last-of-type .dumbbell")
    marked = [bool(one.find_elements("css selector", ".tag.bad")) for one in neighbours]
    assert marked == [i < flipped for i in range(6)]
    if flipped:
        assert page.text(".verdict").endswith("damaged others.")
        assert page.text("#edits .tag").endswith("damaged others")
        assert "failed" in page.text("#edit-details summary")
        assert "unrelated prompts" in page.text("#edit-details .card")


def test_memit_edits_a_range_of_layers(page: Page) -> None:
    page.open("#/edit")
    Select(page.find("[name=method]")).select_by_value("memit")
    assert not page.find("#layers").is_displayed()
    for name, layer in {"first-layer": "0", "last-layer": "1"}.items():
        page.find(f"[name={name}]").clear()
        page.find(f"[name={name}]").send_keys(layer)
    assert "spread" in page.text("#method-help")
    assert "No second moment C was collected for layer 0, 1" in page.text("#layer-notes")
    page.edit("Rome")
    assert len(page.texts("#edit-details details p.soft")) == 2  # changed weights
    page.open(page.js("location.hash"))
    assert page.find("[name=last-layer]").get_attribute("value") == "1"


def test_a_link_restores_a_trace(page: Page) -> None:
    page.write_prompt(CITY, "Eiffel Tower")
    page.set("samples", "2")
    page.trace()
    baseline = page.text("#baseline")
    link = page.js("location.hash")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(page.traced)
    assert page.text("#subject .subject") == "Eiffel Tower"
    assert page.find("[name=samples]").get_attribute("value") == "2"
    assert page.text("#baseline") == baseline


def test_results_stay_with_the_prompt_that_was_traced(page: Page) -> None:
    page.write_prompt(CITY, "Eiffel Tower")
    page.trace()
    baseline = page.text("#baseline")
    page.find("#prompt").send_keys("!")
    assert page.find("#stale").is_displayed()
    assert page.text("#caption").startswith(f"{CITY} ")
    page.click("#examples button:nth-child(2)")
    assert page.prompt != CITY
    assert page.find("#stale").is_displayed()
    assert page.all("#trace-result.stale")
    assert page.text("#caption").startswith(CITY)
    assert page.text("#caption .subject") == "Eiffel Tower"
    page.screenshot("stale")
    page.click("nav [data-view=edit]")
    assert page.all("#layers.bare")  # no bars: they belong to the traced prompt
    page.browser.back()
    page.until(lambda: page.find("#view-trace").is_displayed())
    page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("#copy")
    page.until(lambda: page.text("#copy") == "Copied")
    copied = page.js("window.copied")
    page.js("navigator.clipboard.writeText = async () => { throw new Error('not allowed'); }")
    page.click("#copy")
    page.until(lambda: page.find("#link").is_displayed())
    assert page.js("getSelection().toString()") == page.js("link.value") == copied
    page.open(copied.partition("/")[2].partition("/")[2].partition("/")[2])
    page.until(page.traced)
    assert page.prompt == CITY
    assert page.text("#baseline") == baseline


def test_back_returns_to_the_trace_and_reload_keeps_what_was_typed(page: Page) -> None:
    cells = page.all("#heatmaps .cells")[1]
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).click().perform()
    page.until(lambda: page.find("#view-edit").is_displayed())
    page.browser.back()
    page.until(lambda: page.find("#view-trace").is_displayed())
    assert page.traced()
    page.browser.forward()
    page.until(lambda: page.find("#view-edit").is_displayed())
    page.write_prompt("The Louvre is in the city of", "The Louvre")
    page.find("#edit-form [name=target]").send_keys("Rome")
    page.until(lambda: "Rome" in page.js("decodeURIComponent(location.hash)"))
    page.reload()
    assert page.prompt == "The Louvre is in the city of"
    assert page.text("#subject .subject") == "The Louvre"
    assert page.find("#edit-form [name=target]").get_attribute("value") == "Rome"


DAMAGED_LINKS = (
    "#/edit/%7B%22edits%22%3A5%7D",
    '#/edit/{"edits":[{"prompt":"P","subject":"P"},null]}',
    '#/edit/{"method":7,"settings":3,"layers":"x","edits":"wanted"}',
    '#/trace/{"prompt":[],"settings":7,"traced":5}',
    '#/compare/{"runs":3}',
    "#/trace/%E0%A4%A",
    "#/trace/[1]",
)


def test_a_damaged_link_is_reported_and_the_page_works(page: Page) -> None:
    for link in DAMAGED_LINKS:
        page.open(link)
        page.until(lambda: page.find("#notice").is_displayed() or page.all(".status.failed"))
    page.write_prompt(CITY, TOWER)
    page.trace()


def test_retyping_a_word_keeps_the_subject(page: Page) -> None:
    page.write_prompt("The Louvre is located in the city of", "The Louvre")
    page.select_text(14, 21)  # "located", to be retyped
    assert page.text("#subject .subject") == "The Louvre"
    page.find("#prompt").send_keys("found")
    assert page.text("#subject") == "Subject: The Louvre."
    page.select_text(0, 0)
    page.find("#prompt").send_keys("Today ")
    assert page.text("#subject") == "Subject: The Louvre."
    page.select_text(16, 16)
    page.find("#prompt").send_keys("x")
    assert page.text("#subject") == "The subject changed while you typed. Subject: The Louvrex."
    page.select_text(3, 25)
    page.find("#prompt").send_keys(Keys.BACKSPACE)
    assert page.text("#subject").startswith("The subject was deleted.")
    page.click("#trace-form .go")
    assert "subject" in page.text("#trace-status")


def test_edits_are_the_same_after_a_reload_and_in_another_tab(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    fact = page.text("#edits .fact")
    page.open("#/edit")  # without state in the address
    page.until(lambda: page.text("#edits .fact") == fact)
    assert not page.find("#no-edits").is_displayed()
    page.until(page.updated)
    first = page.browser.current_window_handle
    page.browser.switch_to.new_window("tab")
    page.open("#/edit")
    page.until(page.updated)
    page.click("#edits .quiet")
    page.until(lambda: not page.all("#edits li"))
    page.browser.close()
    page.browser.switch_to.window(first)
    page.js("window.dispatchEvent(new Event('focus'))")
    page.until(lambda: not page.all("#edits li"))


def test_edits_of_a_link_are_listed_apart(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    link = page.js("location.hash")
    page.browser.delete_all_cookies()
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("London")
    page.open(link)
    page.until(page.updated)
    assert page.texts("#edits .fact mark") == ["London"]
    assert page.texts("#link-edits .fact mark") == ["Rome"]
    assert page.find("#shared-edits h3").text == "Edits from a link"
    assert not page.find("#edits input").is_selected()
    assert page.find("#link-edits input").is_selected()
    page.reload()
    page.until(page.updated)
    assert page.texts("#link-edits .fact mark") == ["Rome"]
    assert not page.find("#edits input").is_selected()


def test_a_link_restores_edits_in_another_session(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    page.click("#edits input")
    page.until(page.updated)
    link, fact = page.js("location.hash"), page.text("#edits .fact .subject")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(page.updated)
    assert page.text("#link-edits .fact .subject") == fact
    assert not page.find("#link-edits input").is_selected()


@pytest.mark.parametrize("effect", [0.415, 0.02])
def test_advice_is_about_the_strongest_subject_token(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch, effect: float
) -> None:
    """Not about the last one; and on the scale of the total effect."""
    record = server[1].first_trace
    assert record is not None
    start, stop = record.subject
    rows = [[0.1] * server[1].lm.n_layers for _ in record.tokens]
    rows[start][0] += effect
    rows[stop - 1][2] += 0.011
    rows[-1][0] += 0.6  # not at the subject
    grid = tuple(map(tuple, rows))
    crafted = replace(
        record, clean=0.9, corrupted=0.1, restored=dict.fromkeys(("states", "mlp", "attn"), grid)
    )

    def traced(*args: Any, **more: Any) -> Iterator[TraceRecord]:
        yield replace(crafted, restored={})
        yield crafted

    monkeypatch.setattr("factscope.serve.routes_trace.stream_trace", traced)
    page.set("seed", f"{1000 * effect:.0f}")  # a trace that is not in the cache
    page.trace()
    page.click("nav [data-view=edit]")
    if effect > 0.1:
        label = f"{record.tokens[start].strip()}*"
        wanted = f"at “{label}”. It is highest at layer 0: 41.5 %; the total effect is 80.0 %"
    else:
        size = "at most 2.0 %; the total effect is 80.0 %"
        wanted = f"suggests no layer: restored MLP outputs have an effect of {size}"
    page.until(lambda: wanted in page.text("#layer-notes").replace("\u00a0", " "))
    heights = page.js("[...layers.querySelectorAll('i')].map((e) => parseFloat(e.style.height))")
    assert heights == pytest.approx([100 * effect / 0.8, *[0] * (len(heights) - 1)], abs=0.1)


def test_markup_is_shown_as_text(page: Page) -> None:
    page.js("window.ran = false")
    markup = "<img src=x onerror=ran=true> is in"
    page.write_prompt(markup, "<img src=x")
    page.trace()
    page.open("#/edit")
    page.write_prompt(markup, "<img src=x")
    page.click("#layers button:nth-child(2)")
    page.edit("<b>Rome</b>")
    assert "<b>Rome</b>" in page.text("#edits")
    assert page.js("window.ran !== true")
    assert page.js("document.querySelectorAll('main img[src=x], #edits b').length") == 0


def test_error_messages_on_the_page(page: Page) -> None:
    page.find("#prompt").send_keys(Keys.CONTROL, "a")
    page.find("#prompt").send_keys("Nothing is selected")
    page.click("#trace-form .go")
    assert "subject" in page.text("#trace-status")
    page.write_prompt("The " + "word " * 70, "word")
    page.click("#trace-form .go")
    page.until(lambda: "tokens" in page.text("#trace-status"))


def test_the_cancel_button_stops_the_job(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = endless_traces(monkeypatch)
    page.set("seed", "77")
    page.click("#trace-form .go")
    assert started.wait(10)
    page.until(lambda: page.all("#trace-status button"))
    page.click("#trace-status button")
    page.until(lambda: len(server[1].queue) == 0)
    assert page.text("#trace-status") == "cancelled"


def test_all_controls_have_a_label_and_an_explanation_and_can_be_focused(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.js(unnamed) == []
    for view in ("trace", "edit", "compare"):
        page.click(f"nav [data-view={view}]")
        page.js("[...document.querySelectorAll('details')].forEach((e) => { e.open = true; })")
        assert page.unexplained_controls() == []
        assert page.smallest_text() > 10.5
        assert page.js("document.documentElement.scrollWidth") <= WIDTHS[page.width]
    page.click("nav [data-view=trace]")
    page.js("document.querySelector('#trace-form details').open = true")
    seen = set()
    page.find("body").send_keys(Keys.TAB)
    for _ in range(40):
        name = page.js("((e) => e.name || e.id || e.textContent)(document.activeElement)")
        seen.add(name.strip())
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
    assert {"prompt", "distribution", "samples", "window", "Trace", "Edit", "Compare"} <= seen
    assert TOWER in seen  # an example


def test_axe_finds_no_serious_problem(page: Page) -> None:
    page.click("#trace-form summary")
    assert page.accessibility_problems() == []
    page.click("nav [data-view=edit]")
    for summary in page.all("#edit-form summary"):
        summary.click()
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    page.click("#edit-details summary")
    assert page.accessibility_problems() == []
    page.open("#/compare")
    assert page.accessibility_problems() == []
    page.click("#run-list li:nth-child(1) label")
    page.until(lambda: page.all("#compared table"))
    assert page.accessibility_problems() == []

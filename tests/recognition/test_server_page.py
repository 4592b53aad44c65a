"""The server's page in a real browser."""

import json

import pytest
from PIL import Image

pytest.importorskip("fastapi")

from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser, server):
    browser.send(
        "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
    )
    browser.window(1000)
    browser.open(server.address)
    wait_until(lambda: browser.run("!!document.querySelector('#files')"))
    return browser


def upload(page, files) -> None:
    node = page.send("Runtime.evaluate", expression="document.querySelector('#files')")["result"]["objectId"]
    page.send("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=node)


def cards(page) -> list[dict]:
    script = """JSON.stringify([...document.querySelectorAll('article')].map(one => ({
        rows: [...one.querySelectorAll('.row')].map(row => row.firstChild.textContent),
        near: one.querySelectorAll('figure img').length,
        bad: one.querySelector('.bad') && one.querySelector('.bad').textContent,
        loaded: [...one.querySelectorAll('img')].every(image => image.complete && image.naturalWidth > 0)})))"""
    return json.loads(page.run(script))


def test_an_answer_has_bars(trained, page):
    from duplex import Recognizer

    image = trained.images()[0]
    upload(page, [image])
    wait_until(lambda: len(cards(page)) == 1 and cards(page)[0]["loaded"])
    (card,) = cards(page)
    (answer,) = Recognizer.load(trained.run(), device="cpu")(image)
    assert card["rows"][:3] == [guess.name for guess in answer.top]
    assert card["rows"][3] == next(iter(answer.states)) and card["near"] == 4
    width = page.run("document.querySelector('.bar i').style.width")
    assert float(width.rstrip(" %")) == pytest.approx(100 * answer.best.probability, abs=0.2)
    assert page.complaints == []
    assert {url.split("?")[0] for url in page.requests if url.startswith("http")} <= {
        page_url(page),
        page_url(page) + "predict",
    }


def page_url(page) -> str:
    return page.run("location.origin + '/'")


def test_a_bad_file_is_reported(page, tmp_path):
    bad = tmp_path / "<b>bad.jpg"
    bad.write_text("nothing")
    upload(page, [bad])
    wait_until(lambda: len(cards(page)) == 1)
    assert cards(page)[0]["bad"] == "This file cannot be used: not an image."
    assert page.run("document.querySelector('.name').textContent") == "<b>bad.jpg"
    assert page.run("document.querySelector('.name b')") is None


def test_an_image_of_something_else_is_marked(trained, page, tmp_path):
    from duplex import Recognizer

    blank = tmp_path / "blank.png"
    Image.new("RGB", (64, 64), "white").save(blank)
    images = [blank, *trained.images()[:3]]
    answers = Recognizer.load(trained.run(), device="cpu")(images)
    assert not answers[0].in_distribution and any(answer.in_distribution for answer in answers)
    upload(page, images)
    wait_until(lambda: len(cards(page)) == 4 and all(card["loaded"] for card in cards(page)))
    script = "[...document.querySelectorAll('article')].map(one => !!one.querySelector('.unknown'))"
    marked = json.loads(page.run(f"JSON.stringify({script})"))
    assert marked == [not answer.in_distribution for answer in answers]


def test_the_page_works_by_keyboard(trained, page):
    """Tab reaches the files; Enter opens the chooser; the next stops are the camera and the link."""
    page.send("Page.setInterceptFileChooserDialog", enabled=True)
    page.press("Tab", 9)
    assert page.run("document.activeElement.id") == "files"
    page.press("Enter", 13)
    wait_until(lambda: page.run("1") and any(event["method"] == "Page.fileChooserOpened" for event in page.events))
    opened = next(event for event in page.events if event["method"] == "Page.fileChooserOpened")
    page.send(
        "DOM.setFileInputFiles", files=[str(trained.images()[1])], backendNodeId=opened["params"]["backendNodeId"]
    )
    wait_until(lambda: len(cards(page)) == 1)
    page.press("Tab", 9)
    assert page.run("document.activeElement.id") == "camera"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter", 13)
    wait_until(lambda: page.run("document.querySelector('#say').textContent") == "No camera is available.")


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1000, True)])
def test_narrow_and_dark_layouts(trained, page, width, dark):
    page.window(width, dark=dark)
    upload(page, trained.images()[:2])
    wait_until(lambda: len(cards(page)) == 2 and cards(page)[0]["loaded"])
    assert page.run("document.documentElement.scrollWidth") <= width
    ground, ink = (
        channels(page.run(f"getComputedStyle(document.body).{name}")) for name in ("backgroundColor", "color")
    )
    assert (sum(ground) < sum(ink)) == dark
    assert contrast(ground, ink) > 7


def channels(text: str) -> list[int]:
    return [int(part) for part in text.removeprefix("rgb(").rstrip(")").split(",")]


def contrast(one: list[int], other: list[int]) -> float:
    def light(colour: list[int]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted(map(light, (one, other)))
    return (high + 0.05) / (low + 0.05)

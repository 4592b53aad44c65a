"""The page in a browser, opened from disk without a network."""

import pytest

TEXTS = "h1, h2, h3, h4, p, td, th, a, caption, figcaption, dt, dd, code, .thumb-name, .thumb-line, .spread, .mark"
CONTRAST = (  # texts whose contrast with their background is below WCAG's 4.5
    """(() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(x => colour.startsWith('color(') ? +x : x / 255)
      .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour) && colour !== 'transparent') return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const low = [];
  for (const e of document.querySelectorAll('"""
    + TEXTS
    + """')) {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) low.push(e.className + ' ' + e.textContent.trim().slice(0, 40));
  }
  return low;
})()"""
)


@pytest.fixture
def page(browser, project):
    browser.window(1200)
    browser.open(project.page)
    return browser


def test_all_images_load_without_requests_or_errors(page, project):
    loaded = page.run("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
    assert len(loaded) > 40 and all(width > 10 for width in loaded)
    assert page.complaints == []
    assert page.requests == [project.page.resolve().as_uri()]


def test_tables_sort_by_the_clicked_column(page):
    table = "document.querySelector('table')"
    read = f"[...{table}.tBodies[0].rows].map(r => Number(r.cells[4].dataset.value))"
    heading = f"{table}.querySelectorAll('th button')[4]"
    before = page.run(read)
    page.click(heading)
    assert page.run(read) == sorted(before, reverse=True)
    assert page.run(f"{heading}.parentElement.getAttribute('aria-sort')") == "descending"
    page.click(heading)
    assert page.run(read) == sorted(before)
    page.click(f"{table}.querySelector('th button')")
    assert page.run(f"[...{table}.tBodies[0].rows].map(r => r.cells[0].textContent)") == ["clip", "duplex"]


@pytest.mark.parametrize(("width", "media"), [(320, "screen"), (400, "screen"), (1200, "screen"), (720, "print")])
@pytest.mark.parametrize("dark", [False, True])
def test_both_themes_fit_every_width_and_print_is_dark_on_light(browser, project, width, media, dark):
    browser.window(width, dark=dark, media=media)
    browser.open(project.page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (dark and media == "screen")
    if media == "print":
        assert ground == "rgb(255, 255, 255)"
        assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run(CONTRAST) == []

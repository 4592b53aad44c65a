"use strict";
// Click on a column heading: sort the table, numbers descending first, words ascending first.
for (const button of document.querySelectorAll("th[scope=col] button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const heads = [...head.parentElement.children];
    const column = heads.indexOf(head);
    const numeric = head.classList.contains("num");
    const before = head.getAttribute("aria-sort");
    const rising = before === "none" ? !numeric : before === "descending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const key = (row) => {
      const value = row.cells[column].dataset.value;
      return value === undefined ? null : numeric ? Number(value) : value;
    };
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null); // missing values stay last
      const sign = numeric ? x - y : x.localeCompare(y);
      return rising ? sign : -sign;
    };
    body.append(...[...body.rows].sort(order));
  });
}
// Hover text, for mouse and touch.
const tip = document.getElementById("tip");
const show = (event) => {
  const owner = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.dataset.tip;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const left = Math.max(8, Math.min(event.clientX + 12, document.documentElement.clientWidth - width - 8));
  const above = event.clientY - height - 12;
  tip.style.left = left + "px";
  tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
};
document.addEventListener("mousemove", show);
document.addEventListener("click", show);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

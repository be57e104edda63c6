// Heat maps: display the row, layer and numbers of the cell under the pointer or the arrow keys.
const percent = (x) => (100 * x).toFixed(1) + " %";
const signed = (x, format) => (x < 0 ? "−" : "+") + format(Math.abs(x));
const clamp = (x, count) => Math.max(0, Math.min(count - 1, x));

for (const heat of document.querySelectorAll(".heat")) {
  const data = JSON.parse(heat.querySelector("script").textContent);
  const cells = heat.querySelector(".cells");
  const output = heat.querySelector("output");
  const select = heat.querySelector("select");
  const caption = output.textContent;
  const mark = cells.appendChild(document.createElement("div"));
  const rows = data.rows.length, columns = data.views[0].scores[0].length;
  const format = data.percent ? percent : (x) => x.toFixed(2);
  let view = data.views[0], row = 0, column = 0;
  mark.className = "mark";
  mark.hidden = true;

  function numbers() {
    const score = view.scores[row][column];
    if (score === null) return "not measured";
    let text = `${data.label} = ${format(score)}`;
    if (data.effect) {
      const effect = data.effect.sign * (score - data.effect.base);
      text += `, effect ${signed(effect, format)}`;
      if (data.effect.total > 0) text += ` (${Math.round((100 * effect) / data.effect.total)} % of the total effect)`;
    }
    if (data.top) text += " · top: " + data.top[row][column].map(([token, p]) => `${token} ${percent(p)}`).join(", ");
    return text;
  }

  function show() {
    output.textContent = `${data.rows[row]} · layer ${column} · ${numbers()}`;
    mark.hidden = false;
    mark.style.left = `${(100 * column) / columns}%`;
    mark.style.top = `${(100 * row) / rows}%`;
    mark.style.width = `${100 / columns}%`;
    mark.style.height = `${100 / rows}%`;
  }

  function hide() {
    mark.hidden = true;
    output.textContent = caption;
  }

  function point(event) {
    const box = cells.getBoundingClientRect();
    column = clamp(Math.floor(((event.clientX - box.left) / box.width) * columns), columns);
    row = clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), rows);
    show();
  }

  function press(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    row = clamp(row + step[0], rows);
    column = clamp(column + step[1], columns);
    show();
  }

  cells.addEventListener("pointermove", point);
  cells.addEventListener("pointerdown", point);
  cells.addEventListener("pointerleave", hide);
  cells.addEventListener("focus", show);
  cells.addEventListener("blur", hide);
  cells.addEventListener("keydown", press);
  select?.addEventListener("change", () => {
    view = data.views[select.value];
    cells.querySelector("img").src = view.image;
  });
}

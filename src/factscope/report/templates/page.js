// Heat maps: display the token, layer and probability of the cell under the pointer or the arrow keys.
for (const heat of document.querySelectorAll(".heat")) {
  const { tokens, scores, corrupted } = JSON.parse(heat.querySelector("script").textContent);
  const cells = heat.querySelector(".cells");
  const output = heat.querySelector("output");
  const caption = output.textContent;
  const mark = cells.appendChild(document.createElement("div"));
  const rows = scores.length, columns = scores[0].length;
  let row = 0, column = 0;
  mark.className = "mark";
  mark.hidden = true;

  const percent = (x) => (100 * x).toFixed(1) + " %";

  function show() {
    const score = scores[row][column];
    const effect = score === null ? 0 : score - corrupted;
    const value = score === null ? "not measured"
      : `p = ${percent(score)}, effect ${effect < 0 ? "−" : "+"}${percent(Math.abs(effect))}`;
    output.textContent = `${tokens[row]} · layer ${column} · ${value}`;
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

  const clamp = (x, count) => Math.max(0, Math.min(count - 1, x));

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
}

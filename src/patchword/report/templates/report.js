// Show the values of a training curve under the pointer. Every point is [x in the viewBox, text].
for (const svg of document.querySelectorAll("svg[data-lines]")) {
  const lines = JSON.parse(svg.dataset.lines);
  const cursor = svg.querySelector(".cursor");
  const tip = svg.parentNode.querySelector(".tip");
  const viewWidth = svg.viewBox.baseVal.width;

  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * viewWidth / box.width;
    const nearest = line => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const found = lines.map(nearest);
    const at = found[0][0];
    tip.textContent = found.map((point, i) => (lines[i].name + " " + point[1]).trim()).join("\n");
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const left = at * box.width / viewWidth;
    const width = tip.offsetWidth;
    tip.style.left = (left + width + 24 > box.width ? Math.max(0, left - width - 10) : left + 10) + "px";
    tip.style.top = box.top - svg.parentNode.getBoundingClientRect().top + 14 + "px";
    tip.style.visibility = cursor.style.visibility = "visible";
  });

  svg.addEventListener("pointerleave", () => {
    tip.style.visibility = cursor.style.visibility = "hidden";
  });
}

// Print everything, also what is folded away.
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});

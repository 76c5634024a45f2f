// Keeps the page current: panels that the server has rendered replace the old ones as they change, and ages and
// remaining times are counted here, by the server's clock. It requests nothing but /events.
"use strict";

(() => {
  const live = document.getElementById("live");
  const announcement = document.getElementById("announcement");
  let ahead = Number(document.body.dataset.now) - Date.now() / 1000;

  const now = () => Date.now() / 1000 + ahead;

  function span(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 60) return `${whole} s`;
    const two = (n) => String(n).padStart(2, "0");
    const [s, m, h, d] = [whole % 60, Math.floor(whole / 60) % 60, Math.floor(whole / 3600) % 24, Math.floor(whole / 86400)];
    if (d) return `${d} d ${h} h`;
    return h ? `${h} h ${two(m)} m` : `${m} m ${two(s)} s`;
  }

  function put(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function tick() {
    const at = now();
    for (const node of document.querySelectorAll("time[data-for]")) put(node, span(at - node.dataset.for));
    for (const node of document.querySelectorAll("time[data-ago]")) put(node, `${span(at - node.dataset.ago)} ago`);
    for (const node of document.querySelectorAll("time[data-left]")) put(node, `${span(node.dataset.left - at)} left`);
    for (const node of document.querySelectorAll("progress[data-until]")) {
      node.value = Math.min(node.max, Math.max(0, node.dataset.until - at));
      node.classList.toggle("low", node.value < 0.3 * node.max);
    }
  }

  function replace(name, html) {
    const place = document.querySelector(`[data-panel="${name}"]`);
    if (!place) return;
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    place.innerHTML = html; // rendered by the server, which escapes every value
    if (focused) {
      const again = [...place.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }

  function announce() {
    const titles = [...document.querySelectorAll(".problems h3")];
    document.title = `${titles.length ? `(${titles.length}) ` : ""}holdfast`;
    const text = titles.length ? titles.map((title) => title.textContent.trim()).join(". ") : "No problems";
    put(announcement, text); // a screen reader reads it when it changes
  }

  function showStatus(name, text) {
    live.className = `live ${name}`;
    put(live, text);
  }

  function follow() {
    const stream = new EventSource("/events");
    stream.addEventListener("open", () => showStatus("on", "live"));
    stream.addEventListener("state", (event) => {
      const state = JSON.parse(event.data);
      ahead = state.now - Date.now() / 1000;
      for (const [name, html] of Object.entries(state.panels)) replace(name, html);
      announce();
      tick();
    });
    stream.addEventListener("clock", (event) => {
      ahead = JSON.parse(event.data).now - Date.now() / 1000;
    });
    stream.addEventListener("error", () => {
      showStatus("off", "not live, trying again");
      if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000); // refused: EventSource does not retry then
    });
    window.addEventListener("pagehide", () => stream.close());
  }

  tick();
  setInterval(tick, 500);
  follow();
})();

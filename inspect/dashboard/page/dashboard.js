// The dashboard: what the server sends is kept by section, and shown. Texts
// come from others, so nothing is ever made HTML of them.

const sections = new Map(); // name -> {order, rows, total, page}
const $ = (id) => document.getElementById(id);

// el makes an element: el("p", {class: "detail"}, "text", otherElement).
function el(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== "") e.setAttribute(name, value);
  }
  e.append(...children.filter((c) => c !== undefined && c !== ""));
  return e;
}

const number = new Intl.NumberFormat("en");
const count = (n, one, many) => `${number.format(n)} ${n === 1 ? one : many}`;
const names = (list, more) => list.join(", ") + (more ? ` and ${number.format(more)} more` : "");

// missing returns how many of "3 of 5 ready" are not; nothing: none.
function missing(text) {
  const [ready, all] = (text.match(/\d+/g) ?? []).map(Number);
  return all > ready ? `${number.format(all - ready)} not ready` : "";
}

// age writes how long ago a time was.
function age(text) {
  const s = Math.max(0, (Date.now() - Date.parse(text)) / 1000);
  if (s < 120) return `${Math.floor(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

function time(text) {
  return el("time", { datetime: text, title: new Date(text).toLocaleString() }, age(text));
}

// bar draws shares of a whole, in percent: [[share, class], ...].
function bar(shares, label) {
  const b = el("div", { class: "bar", role: "img", "aria-label": label });
  for (const [share, name] of shares) {
    const part = el("i", { class: name });
    part.style.flex = `0 0 ${share}%`;
    b.append(part);
  }
  return b;
}

const badge = (text, tone, title) => el("span", { class: `badge ${tone}`, title }, text);

// show makes the container's children those of the section, and keeps those that
// did not change.
const shown = new Map(); // container -> Map(id -> {row, element})
function show(container, section, draw, empty, more) {
  const before = shown.get(container);
  const after = new Map();
  const children = section.order.map((id) => {
    const row = section.rows[id];
    const known = before?.get(id);
    const element = known?.row === row ? known.element : draw(row);
    if (before && known?.row !== row) element.classList.add("fresh");
    after.set(id, { row, element });
    return element;
  });
  if (children.length === 0 && empty) children.push(empty(section.unknown ? "Not known." : undefined));
  if (more && section.more) children.push(more(`and ${number.format(section.more)} more: lodestone status shows all`));
  const same = children.length === container.children.length && children.every((c, i) => c === container.children[i]);
  if (!same) container.replaceChildren(...children);
  shown.set(container, after);
}

const draw = {
  head(section) {
    const h = section.rows.head;
    $("cluster").textContent = h.clusterID ?? "";
    document.title = h.warnings ? `(${h.warnings}) Lodestone ${h.clusterID ?? ""}` : `Lodestone ${h.clusterID ?? ""}`;
    $("verdict").className = `verdict ${h.warnings ? "bad" : "good"}`;
    $("verdict").querySelector("h2").textContent = h.warnings ? count(h.warnings, "thing to look at", "things to look at") : "All is well";
    const [configured, parts] = h.configuration.split(": ");
    const tile = (name, of, big, bad, good) => of ? [name, big(of), of.bad ? `${number.format(of.bad)} ${bad}` : good(of), of.bad > 0] : [name, "not known", "", false];
    const tiles = [
      tile("Services", h.services, (of) => number.format(of.good), "waiting", () => "none is waiting"),
      tile("VIPs", h.vips, (of) => number.format(of.good + of.bad), "announced by nobody", (of) => of.good ? "all announced" : ""),
      ["Speakers", h.speakers.replace(" ready", ""), missing(h.speakers) || (h.speakers.endsWith(" ready") ? "ready" : ""), missing(h.speakers)],
      tile("BGP sessions", h.sessions, (of) => of.good + of.bad ? `${number.format(of.good)} of ${number.format(of.good + of.bad)}` : "none", "not established", (of) => of.good ? "established" : ""),
      ["Controller", h.controller.replace(" ready", ""), h.leader ? `${h.leader} leads` : h.controller === "not read" ? "" : "nobody leads", !h.leader],
      ["Configuration", configured, parts ?? "", configured !== "valid"],
    ];
    $("tiles").replaceChildren(...tiles.map(([name, big, sub, bad]) =>
      el("div", { class: "tile" }, el("dt", {}, name), el("dd", { class: "big" }, big), el("dd", { class: bad ? "sub bad" : "sub" }, sub))));
  },
  warnings(section) {
    show($("verdict").querySelector("ul"), section, (w) => el("li", {}, el("b", {}, w.about), el("span", {}, w.message)), undefined,
      (text) => el("li", {}, el("span", {}, text)));
  },
  pools(section) {
    show($("pools"), section, (p) => el("div", { class: `pool ${p.tone}` },
      el("div", { class: "row" }, el("span", {}, p.name), el("span", {}, p.family ?? "")),
      bar([[p.used], [p.quarantined, "quarantined"], [p.reserved, "reserved"]], p.text),
      el("div", { class: "row" }, el("span", { class: p.tone === "bad" ? "detail bad" : "detail" }, p.text), p.note ? badge(p.note, "note") : el("span"))),
    (unknown) => el("p", { class: "empty" }, unknown ?? "No pools."), (text) => el("p", { class: "empty" }, text));
  },
  nodes(section) {
    $("nodes-count").textContent = number.format(section.total);
    show($("nodes"), section, (n) => {
      const name = el("button", { type: "button", title: "Show what it announces" }, n.name);
      name.addEventListener("click", () => find(n.name));
      const what = [n.layer2 && `${number.format(n.layer2)} by layer 2`, n.bgp && `${number.format(n.bgp)} by BGP`].filter(Boolean).join(", ") ||
        (n.unknown ? "not known what it announces" : "announces nothing");
      const card = el("div", { class: "node" }, el("div", { class: "row" }, name, n.ready ? badge("ready", "good") : badge(n.problem ? "not ready" : "no speaker", n.problem ? "bad" : "")),
        bar([[n.share]], what),
        el("div", { class: "detail" }, what));
      if (n.problem) card.append(el("div", { class: "detail bad" }, n.problem));
      const sessions = (n.sessions ?? []).map((s) => {
        const up = s.state === "established";
        return badge(`${s.peer} ${up ? "up" : s.state}${s.bfd ? `, BFD ${s.bfd}` : ""}`, up ? "good" : "bad", s.message ?? s.router ?? "");
      });
      if (n.more) sessions.push(badge(`and ${n.more} more`, ""));
      if (sessions.length) card.append(el("div", { class: "sessions" }, ...sessions));
      if (n.problem || (n.sessions ?? []).some((s) => s.state !== "established")) card.classList.add("bad");
      return card;
    }, () => el("p", { class: "empty" }, "No node is like that."));
    pages("nodes", section, 24);
  },
  peers(section) {
    $("peers-section").hidden = section.order.length === 0;
    show($("peers"), section, (p) => {
      const card = el("div", { class: "peer" }, el("div", { class: "row" }, el("span", {}, p.name), badge(`${p.up} of ${p.nodes} up`, p.up < p.nodes ? "bad" : "good")));
      if (p.message) card.append(el("div", { class: "detail bad" }, p.message));
      return card;
    }, undefined, (text) => el("p", { class: "empty" }, text));
  },
  vips(section) {
    $("vips-count").textContent = number.format(section.total);
    show($("vips"), section, (v) => {
      const who = el("td", {});
      if (v.owner) who.append(el("span", {}, v.owner));
      if (v.routers) who.append(el("span", { class: v.owner ? "detail" : "" }, `BGP: ${names(v.routers, v.moreRouters)}`));
      if (v.others) who.append(el("span", { class: "detail" }, "others: the configuration has advertisements: []"));
      if (v.reason) who.append(badge(v.reason, "bad"), el("span", { class: "detail" }, v.message ?? ""));
      return el("tr", {}, el("td", { class: "vip" }, v.vip), who, el("td", {}, names(v.services ?? [], v.moreServices)), el("td", {}, v.pool ?? ""));
    }, (unknown) => el("tr", {}, el("td", { colspan: 4, class: "empty" }, unknown ?? "No VIP is like that.")));
    pages("vips", section, 25);
  },
  events(section) {
    show($("events"), section, (t) => el("li", { class: t.tone }, time(t.time), t.text),
      () => el("li", {}, "Nothing has happened since somebody looks."));
  },
};

// pages draws what leads to the other pages of a section.
function pages(name, section, size) {
  const last = Math.max(0, Math.ceil(section.total / size) - 1);
  if (last === 0) return $(`${name}-pages`).replaceChildren();
  const to = (text, page) => {
    const b = el("button", { type: "button" }, text);
    b.disabled = page < 0 || page > last;
    b.addEventListener("click", () => { query[name] = page; connect(); });
    return b;
  };
  $(`${name}-pages`).replaceChildren(to("Previous", section.page - 1), to("Next", section.page + 1),
    el("span", {}, `page ${section.page + 1} of ${number.format(last + 1)}`));
}

function change(event) {
  for (const [name, c] of Object.entries(JSON.parse(event.data).sections)) {
    const rows = { ...sections.get(name)?.rows, ...c.rows };
    const section = { ...c, rows: Object.fromEntries(c.order.map((id) => [id, rows[id]])) };
    sections.set(name, section);
    draw[name]?.(section);
  }
}

const query = { q: "", trouble: "", vips: 0, nodes: 0 };
let source, again;

function live(text, tone) {
  $("live").textContent = text;
  $("live").className = `live ${tone}`;
}

// connect asks for the page that the query is about, and what changes of it.
function connect() {
  source?.close();
  clearTimeout(again);
  shown.clear();
  const parameters = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  source = new EventSource(`events?${parameters}`);
  source.addEventListener("change", (event) => { live("live", ""); change(event); });
  source.addEventListener("again", connect); // the server sends no page for ever
  source.addEventListener("open", () => { live("connected", "wait"); sections.clear(); shown.clear(); });
  source.addEventListener("error", async (event) => {
    live("connection lost, trying again", "lost");
    if (event.target.readyState !== EventSource.CLOSED) return;
    again = setTimeout(connect, 5000); // refused: it does not try by itself, and does not show why
    const answer = await fetch(`view?${parameters}`).catch(() => undefined);
    if (answer?.ok === false && event.target === source) live(`refused, trying again: ${(await answer.text()).slice(0, 200)}`, "lost");
  });
}

function find(text) {
  const form = $("search");
  form.elements.q.value = text;
  form.requestSubmit();
}

let typing;
function search() {
  const form = $("search");
  Object.assign(query, { q: form.elements.q.value.trim(), trouble: form.elements.trouble.checked ? "1" : "", vips: 0, nodes: 0 });
  connect();
}
$("search").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); search(); });
$("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 250); });
setInterval(() => {
  for (const t of document.querySelectorAll("time")) t.textContent = age(t.dateTime);
}, 5000);

connect();

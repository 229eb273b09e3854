"use strict";
const find = id => document.getElementById(id);
const all = query => [...document.querySelectorAll(query)];
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const players = [];
let touched = null;

function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// --- data: inflated, each frame XOR the one before it undone ---

async function unpack(text, size, Numbers = Uint8Array) {
  const inflate = new DecompressionStream("deflate"), writer = inflate.writable.getWriter();
  writer.write(Uint8Array.from(atob(text), c => c.charCodeAt(0)));
  writer.close();
  const numbers = new Numbers(await new Response(inflate.readable).arrayBuffer());
  for (let i = size; i < numbers.length; i++) numbers[i] ^= numbers[i - size];
  return numbers;
}

// --- a player: a button, a slider, and where it stands ---

class Player {
  constructor(id, frames, show, seconds = 7) {
    Object.assign(this, { host: find(id), last: frames - 1, show, seconds, timer: null });
    const name = this.host.dataset.name;
    this.button = make("button", "play", "Play");
    this.slider = make("input");
    this.label = make("output");
    this.label.setAttribute("aria-live", "off");
    Object.assign(this.slider, { type: "range", min: 0, max: this.last, value: this.last });
    this.slider.setAttribute("aria-label", `step of ${name}`);
    this.button.addEventListener("click", () => { this.touch(); this.toggle(); });
    this.slider.addEventListener("input", () => {
      this.touch();
      this.stop();
      this.go(+this.slider.value);
    });
    this.host.append(this.button, this.slider, this.label);
    players.push(this);
    this.go(this.last);
  }

  touch() { touched = this; }

  go(to) {
    this.at = Math.max(0, Math.min(this.last, to));
    this.slider.value = this.at;
    const words = this.at < this.last ? `step ${this.at + 1} of ${this.last}` : "the end";
    this.label.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    this.show(this.at);
  }

  toggle() { this.timer ? this.stop() : this.play(); }

  stop() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
  }

  play() {
    if (this.at === this.last) this.go(0);
    this.button.textContent = "Pause";
    let before = performance.now(), owed = 0;
    const tick = now => {
      owed += Math.max(now - before, 0) / 1000 * this.last / this.seconds;
      before = now;
      if (owed >= 1) { this.go(this.at + Math.floor(owed)); owed %= 1; }
      if (this.at === this.last) this.stop();
      else this.timer = requestAnimationFrame(tick);
    };
    this.timer = requestAnimationFrame(tick);
  }
}

function current() { // what was touched if it can be seen, else what is nearest to the middle
  const away = player => {
    const box = player.host.closest("section").getBoundingClientRect();
    return Math.max(box.top - innerHeight / 2, innerHeight / 2 - box.bottom, 0);
  };
  const seen = player => {
    const box = player.host.closest("section").getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  };
  if (touched && seen(touched)) return touched;
  return players.reduce((a, b) => away(b) < away(a) ? b : a);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const used = event.target.closest("button, select, summary, input");
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === " " && !used) current().toggle();
  else if (step && !event.target.closest("select, input")) {
    const player = current();
    player.stop();
    player.go(player.at + step);
  } else return;
  event.preventDefault();
}

// --- Sudoku: two boards, the course of their mistakes, a tile for each puzzle ---

async function sudoku({ clues, solutions, runs }) {
  const count = runs[0].solved.length, size = 81 * count;
  clues = await unpack(clues, Infinity);
  solutions = await unpack(solutions, Infinity);
  for (const run of runs) run.tokens = await unpack(run.tokens, size);
  const frames = runs[0].tokens.length / size, last = frames - 1;
  const token = (run, frame, i) => run.tokens[frame * size + i];
  const boards = all(".board"), states = all(".state"), ends = all("figcaption b");
  for (const board of boards) board.append(...Array.from({ length: 81 }, () => make("span")));
  let puzzle = 0;

  const wrong = (run, frame) => {
    let sum = 0;
    for (let i = 81 * puzzle; i < 81 * puzzle + 81; i++)
      sum += token(run, frame, i) !== solutions[i];
    return sum;
  };
  const show = frame => runs.forEach((run, r) => {
    for (let place = 0; place < 81; place++) {
      const i = 81 * puzzle + place, id = token(run, frame, i), cell = boards[r].children[place];
      let look = clues[i] < 9 ? "clue" : id === solutions[i] ? "right" : "wrong";
      if (frame && id !== token(run, frame - 1, i)) look += " fresh";
      cell.className = look;
      cell.textContent = id + 1;
    }
    const left = wrong(run, frame), words = left ? `${left} cells wrong` : "all cells right";
    states[r].textContent = left === 1 ? "1 cell wrong" : words;
    states[r].classList.toggle("done", !left);
    boards[r].setAttribute("aria-label", `${run.name}: ${states[r].textContent}`);
    cursor.setAttribute("x1", frame);
    cursor.setAttribute("x2", frame);
  });

  const course = document.querySelector(".course"), cursor = draw("line", { y1: 0, y2: 100 });
  const follow = () => {
    const counts = runs.map(run => Array.from({ length: frames }, (_, f) => wrong(run, f)));
    const high = Math.max(...counts.flat(), 1);
    find("most").textContent = high;
    counts.forEach((each, r) => { ends[r].textContent = each[last]; });
    course.setAttribute("viewBox", `0 0 ${Math.max(last, 1)} ${high}`);
    const ways = counts.map((each, r) =>
      draw("path", { class: `s${r}`, d: "M" + each.map((n, f) => `${f} ${high - n}`).join("L") }));
    course.replaceChildren(cursor, ...ways);
  };

  const grid = document.querySelector(".tiles");
  const choose = to => {
    puzzle = (to + count) % count;
    find("puzzle").value = puzzle;
    [...grid.children].forEach((tile, i) => tile.toggleAttribute("data-chosen", i === puzzle));
    follow();
  };
  for (let i = 0; i < count; i++) {
    const [a, b] = runs.map(run => run.solved[i]);
    const who = a && b ? "both solve it" : b ? "only Ψ" : a ? "only ancestral" : "neither";
    const tile = make("i"), words = `${i + 1}: ${who}`;
    find("puzzle").add(new Option(words, i));
    tile.append(make("b", a ? "on" : ""), make("b", b ? "on" : ""));
    tile.title = words;
    tile.addEventListener("click", () => restart(i));
    grid.append(tile);
  }
  const gains = runs[1].solved.findIndex((solved, i) => solved && !runs[0].solved[i]);
  choose(Math.max(gains, 0)); // the first that Ψ alone solves, if there is one
  const player = new Player("solving", frames, show);
  const restart = to => {
    player.touch();
    player.stop();
    choose(to);
    if (calm.matches) player.go(last);
    else { player.go(0); player.play(); }
  };
  find("puzzle").addEventListener("change", event => restart(+event.target.value));
  find("previous").addEventListener("click", () => restart(puzzle - 1));
  find("next").addEventListener("click", () => restart(puzzle + 1));
  return player;
}

// --- prose: an element for each token ---

async function prose({ tokens, routes, given, pieces }) {
  const size = given.length, body = find("passage");
  tokens = await unpack(tokens, size, Uint16Array);
  routes = await unpack(routes, size);
  const spans = given.map(() => make("span"));
  body.append(...spans);
  const show = frame => spans.forEach((span, i) => {
    const piece = pieces[tokens[frame * size + i]], route = routes[frame * size + i];
    if (span.textContent !== piece) span.textContent = piece;
    span.className = given[i] ? "given" : ["", "predicted", "renoised"][route];
  });
  const frames = tokens.length / size, player = new Player("writing", frames, show, 9);
  const hold = () => { // always as high as the finished text, so that nothing jumps
    body.style.height = "";
    show(player.last);
    body.style.height = `${body.offsetHeight}px`;
    show(player.at);
  };
  hold();
  addEventListener("resize", hold);
}

// --- digits: ink on paper, ten in a row ---

async function digits({ tokens, count, levels }) {
  const size = 64 * count, canvas = find("digits"), pen = canvas.getContext("2d");
  const dot = 8, wide = 9 * dot; // a digit and the gap beside it
  tokens = await unpack(tokens, size);
  canvas.width = 10 * wide;
  canvas.height = Math.ceil(count / 10) * wide;
  const show = frame => {
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = getComputedStyle(canvas).color;
    for (let i = 0; i < size; i++) {
      const digit = Math.floor(i / 64), x = i % 8, y = Math.floor(i % 64 / 8);
      pen.globalAlpha = tokens[frame * size + i] / (levels - 1);
      pen.fillRect((digit % 10) * wide + dot * (x + .5),
        Math.floor(digit / 10) * wide + dot * (y + .5), dot, dot);
    }
  };
  const names = Array.from({ length: 10 }, (_, i) => make("span", "", i));
  document.querySelector(".classes").append(...names);
  const player = new Player("drawing", tokens.length / size, show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(player.at));
}

async function main() {
  const data = JSON.parse(find("data").textContent);
  const first = await sudoku(data.sudoku);
  await prose(data.passage);
  await digits(data.digits);
  document.addEventListener("keydown", press);
  document.body.dataset.ready = "1";
  if (!calm.matches) first.play();
}

main().catch(error => {
  find("failed").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for the replays: it cannot inflate data."
    : `The replays cannot be shown: ${error.message}`;
  throw error;
});

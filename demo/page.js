// What answers a click: every map is in the page already, so nothing here asks the server.
//
// Runs once per panel, as the body of a function of
//   element  what holds the articles that `panels.evidence` writes,
//   watch    watch("value", f) calls f after new ones have come,
//   trigger  trigger("click", data) tells the server.
// An article shows one picture, and one reading (a caption and its maps) or several.

const decode = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
const all = (node, selector) => [...node.querySelectorAll(selector)];
const percent = (value) => `${Math.round(100 * value)} %`;
const states = new WeakMap();  // article -> what it shows

function begin(article) {
  const readings = all(article, ".reading").map((node) => {
    const maps = JSON.parse(node.dataset.maps);
    const levels = maps.words.map(decode);
    const words = all(node, ".caption [data-word]");
    const detail = article.querySelector(`.detail[data-reading="${node.dataset.reading}"]`);
    return {...maps, levels, colours: decode(maps.colours), node, words, detail};
  });
  states.set(article, {readings, reading: 0, word: readings[0].first});
  choose(article, 0, readings[0].first);
  for (const animation of article.getAnimations({subtree: true})) animation.play();
  const photograph = article.querySelector(".stage img");
  photograph.decode().then(() => readings.forEach((reading) => drawStrip(reading, photograph)));
}

// --- drawing ---

function paint(canvas, reading, word) {
  const {rows, columns, levels, colours} = reading;
  canvas.width = columns;
  canvas.height = rows;
  const pixels = new ImageData(columns, rows);
  levels[word].forEach((level, i) => {
    pixels.data.set(colours.subarray(4 * level, 4 * level + 4), 4 * i);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function drawStrip(reading, photograph) {
  all(reading.detail, ".strip canvas").forEach((canvas, word) => {
    const map = document.createElement("canvas");
    paint(map, reading, word);
    canvas.width = 176;
    canvas.height = Math.max(1, Math.round((176 * reading.rows) / reading.columns));
    const pen = canvas.getContext("2d");
    for (const image of [photograph, map]) pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  });
}

function show(article, index, word) {
  const reading = states.get(article).readings[index];
  paint(article.querySelector(".stage canvas"), reading, word);
  const {probability, half} = reading.words[word].dataset;
  const name = document.createElement("b");
  name.textContent = reading.words[word].textContent;
  article.querySelector(".note").replaceChildren(
    name,
    ` was ${percent(probability)} likely here; half of its attention is on ` +
      `${percent(half)} of the picture.`,
  );
}

// --- choosing ---

function choose(article, index, word) {
  const state = states.get(article);
  Object.assign(state, {reading: index, word});
  state.readings.forEach((reading, i) => {
    reading.node.classList.toggle("chosen", i === index);
    reading.detail.hidden = i !== index;
    for (const button of [...reading.words, ...all(reading.detail, "[data-word]")]) {
      const pressed = i === index && Number(button.dataset.word) === word;
      button.setAttribute("aria-pressed", pressed);
      button.tabIndex = pressed ? 0 : -1;
      button.style.removeProperty("--looked");
      delete button.dataset.rank;
    }
  });
  article.querySelector(".marker").hidden = true;
  show(article, index, word);
}

// The same word in the other articles of the panel, where they have it.
function follow(article, step) {
  const {readings, reading, word} = states.get(article);
  const name = readings[reading].words[word].textContent;
  for (const other of all(element, ".evidence").filter((node) => node !== article)) {
    const state = states.get(other);
    const texts = state.readings[state.reading].words.map((button) => button.textContent);
    const same = texts.indexOf(name);
    if (same >= 0) step(other, state.reading, same);
  }
}

// Which words looked at a place (x, y in 0..1), strongest first.
function ask(article, x, y) {
  const {readings, reading: index, word: before} = states.get(article);
  const reading = readings[index];
  const column = Math.min(reading.columns - 1, Math.floor(x * reading.columns));
  const row = Math.min(reading.rows - 1, Math.floor(y * reading.rows));
  const times = reading.levels.map(
    (level) => (reading.times * (level[row * reading.columns + column] - 1)) / 254,
  );
  const found = times.map((value, word) => ({value, word})).filter(({value}) => value > 1);
  found.sort((one, other) => other.value - one.value);
  choose(article, index, found.length ? found[0].word : before);
  found.forEach(({value, word}, rank) => {
    const looked = (value - 1) / (found[0].value - 1);
    reading.words[word].style.setProperty("--looked", looked.toFixed(3));
    reading.words[word].dataset.rank = rank + 1;
  });
  const marker = article.querySelector(".marker");
  marker.style.left = percent(x);
  marker.style.top = percent(y);
  marker.hidden = false;
  const names = found.slice(0, 4).map(
    ({value, word}) => `${reading.words[word].textContent} (${value.toFixed(1)} times even)`,
  );
  article.querySelector(".note").textContent = names.length
    ? `Looked here, strongest first: ${names.join(", ")}.`
    : "No word looked here more than anywhere else.";
}

// --- what a person does ---

function wordAt(event) {
  const button = event.target.closest("[data-word]");
  if (!button) return null;
  const reading = Number(button.closest("[data-reading]").dataset.reading);
  return [button.closest(".evidence"), reading, Number(button.dataset.word)];
}

element.addEventListener("click", (event) => {
  const word = wordAt(event);
  const article = event.target.closest(".evidence");
  const save = event.target.closest("[data-save]");
  if (word) {
    choose(...word);
    follow(article, choose);
  } else if (save) {
    const {readings, reading, word} = states.get(article);
    const {model} = article.dataset;
    const {text} = readings[reading].node.dataset;
    trigger("click", {kind: save.dataset.save, model, text, word});
  } else if (event.target.closest(".stage")) {
    const box = article.querySelector(".stage").getBoundingClientRect();
    ask(article, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  }
});

for (const [kind, shown] of [["mouseover", (_, given) => given], ["mouseout", (state) => state]]) {
  element.addEventListener(kind, (event) => {
    const word = wordAt(event);
    if (!word || !isQuiet(word[0])) return;
    const [article, reading, index] = word;
    const {reading: i, word: j} = shown(states.get(article), {reading, word: index});
    show(article, i, j);
  });
}

// A place that was asked about stays in view until a word is chosen.
function isQuiet(article) {
  return article.querySelector(".marker").hidden;
}

element.addEventListener("keydown", (event) => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  const article = event.target.closest(".evidence");
  if (!step || !article || event.target.matches("input")) return;
  const {readings, reading, word} = states.get(article);
  const count = readings[reading].words.length;
  const next = (word + step + count) % count;
  choose(article, reading, next);
  follow(article, choose);
  const strip = event.target.closest(".strip");
  (strip ? all(strip, "[data-word]") : readings[reading].words)[next].focus();
  event.preventDefault();
});

element.addEventListener("input", (event) => {
  if (!event.target.matches("[name=strength]")) return;
  event.target.closest(".evidence").querySelector(".stage canvas").style.opacity =
    event.target.value;
});

const start = () => all(element, ".evidence").forEach(begin);
watch("value", start);
start();

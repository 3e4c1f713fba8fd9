// SPDX-License-Identifier: Apache-2.0
// What compiled formulas need of Python and NumPy, of one number each: same values, same errors.
// Python's tuples, lists and deques are arrays here, its dicts are Maps, its None is null.

const fail = (why) => {
  throw new Error(why);
};

const certain = (holds, what) => holds || fail(`not so: ${what}`);
export { certain as assert };

// Python looks up tuples and records by what is in them; so do these dicts. Of keys that are equal the
// first stays. Keys must be what Python can hash: numbers, words, None, tuples and records of such.
let classes = 0;
const numbers = new WeakMap();
const names = new WeakMap();

function named(value) {
  if (typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) return `(${value.map(named).join()})`;
  if (typeof value !== "object" || value === null) return String(typeof value === "boolean" ? Number(value) : value);
  if (value instanceof Map) fail("a dict or a set as a key");
  // Records are frozen.
  const known = names.get(value);
  if (known !== undefined) return known;
  const kind = value.constructor;
  if (!numbers.has(kind)) numbers.set(kind, classes++);
  const name = `${numbers.get(kind)}${named(Object.values(value))}`;
  names.set(value, name);
  return name;
}

class Dict extends Map {
  // Where a key has parts: the key that stands for all that are equal to it.
  parts = new Map();

  known(key, add) {
    if (typeof key === "boolean") return Number(key);
    if (typeof key !== "object" || key === null) return key;
    const name = named(key);
    if (add && !this.parts.has(name)) this.parts.set(name, key);
    return this.parts.get(name);
  }

  has(key) {
    return super.has(this.known(key));
  }

  get(key) {
    return super.get(this.known(key));
  }

  set(key, value) {
    return super.set(this.known(key, true), value);
  }

  delete(key) {
    const there = super.delete(this.known(key));
    if (typeof key === "object" && key !== null) this.parts.delete(named(key));
    return there;
  }
}

// A set is a dict without values, in the order in which its members came.
class Members extends Dict {}
class Counts extends Dict {}

function filled(made, pairs) {
  for (const [key, value] of pairs) made.set(key, value);
  return made;
}

export const dict = (value = []) => filled(new Dict(), value);
export const set = (values = []) => filled(new Members(), iter(values).map((one) => [one, true]));
export const counter = () => new Counts();

export function truth(value) {
  if (typeof value === "boolean") return value;
  if (typeof value === "number") return value !== 0;
  if (value === null || value === undefined) return false;
  if (typeof value === "string" || Array.isArray(value)) return value.length > 0;
  return value instanceof Map ? value.size > 0 : true;
}

export const both = (first, second) => (truth(first) ? second() : first);
export const either = (first, second) => (truth(first) ? first : second());

export function number(value) {
  if (typeof value === "number") return value;
  return typeof value === "boolean" ? Number(value) : fail(`${value} is no number`);
}

export function add(left, right) {
  if (typeof left === "number" && typeof right === "number") return left + right;
  if (Array.isArray(left) && Array.isArray(right)) return [...left, ...right];
  if (typeof left === "string" && typeof right === "string") return left + right;
  return number(left) + number(right);
}

export function mul(left, right) {
  if (typeof left === "number" && typeof right === "number") return left * right;
  if (typeof left === "string") return left.repeat(Math.max(0, number(right)));
  if (Array.isArray(left)) return range(number(right)).flatMap(() => left);
  return number(left) * number(right);
}

// As CPython and NumPy: by the remainder, so that what is rounded once is rounded alike.
export function floordiv(left, right) {
  const [a, b] = [number(left), number(right)];
  if (b === 0) return a / b;
  const quotient = (a - mod(a, b)) / b;
  const whole = Math.floor(quotient);
  return quotient - whole > 0.5 ? whole + 1 : whole;
}

export function mod(left, right) {
  const [a, b] = [number(left), number(right)];
  const rest = a % b;
  return rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
}

function bits(left, right, many) {
  if (!Number.isSafeInteger(left) || !Number.isSafeInteger(right)) fail("bits of no whole number");
  return Number(many(BigInt(left), BigInt(right)));
}

const flags = (left, right) => typeof left === "boolean" && typeof right === "boolean";

export function and(left, right) {
  return flags(left, right) ? left && right : bits(number(left), number(right), (a, b) => a & b);
}

export function or(left, right) {
  if (left instanceof Members && right instanceof Members) return set([...keys(left), ...keys(right)]);
  if (left instanceof Map && right instanceof Map) return dict([...left, ...right]);
  return flags(left, right) ? left || right : bits(number(left), number(right), (a, b) => a | b);
}

export const invert = (value) => (typeof value === "boolean" ? !value : fail("~ of no truth value"));

export function eq(left, right) {
  if (Array.isArray(left) && Array.isArray(right)) {
    return left.length === right.length && left.every((one, place) => eq(one, right[place]));
  }
  const plain = (value) => (typeof value === "boolean" ? Number(value) : value);
  if (left instanceof Members && right instanceof Members) {
    return left.size === right.size && keys(left).every((one) => right.has(one));
  }
  if (left instanceof Map || right instanceof Map) fail("== of dicts");
  if (isRecord(left) && isRecord(right)) {
    if (left === right) return true;
    if (left.constructor !== right.constructor) return false;
    return Object.keys(left).every((name) => eq(left[name], right[name]));
  }
  return plain(left) === plain(right);
}

const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

export function has(owner, value) {
  if (owner instanceof Map) return owner.has(value);
  if (typeof owner === "string") return owner.includes(value);
  if (!Array.isArray(owner)) return owner.__contains__(value);
  return owner.some((one) => eq(one, value));
}

export function iter(value) {
  if (Array.isArray(value)) return value;
  if (value instanceof Map) return [...value.keys()];
  return [...value];
}

export const lazy = (value) => (value instanceof Map ? value.keys() : value);

export function unpack(value, count) {
  const found = iter(value);
  return found.length === count ? found : fail(`${found.length} values, not ${count}`);
}

export function item(owner, key) {
  if (owner instanceof Map) {
    if (owner.has(key)) return owner.get(key);
    return owner instanceof Counts ? 0 : fail(`no ${key}`);
  }
  const found = owner[key < 0 ? owner.length + key : Number(key)];
  return found === undefined ? fail(`no place ${key}`) : found;
}

export function setitem(owner, key, value) {
  if (owner instanceof Map) {
    spread.delete(owner);
    return void owner.set(key, value);
  }
  const place = key < 0 ? owner.length + key : Number(key);
  if (place < 0 || place >= owner.length) fail(`no place ${key}`);
  owner[place] = value;
}

export const slice = (owner, from, to) => owner.slice(from, to);

export function attribute(owner, name) {
  const found = owner[name];
  return found === undefined ? fail(`no attribute ${name}`) : found;
}

export const given = (value, otherwise) => (value === undefined ? otherwise : value);
export const required = (value, name) => (value === undefined ? fail(`no ${name}`) : value);
// Rows of tables become records again and again.
const spread = new WeakMap();
export function members(value) {
  if (!(value instanceof Map)) return value;
  if (!spread.has(value)) spread.set(value, Object.fromEntries(value));
  return spread.get(value);
}

export const replace = (record, changes) => new record.constructor({ ...record, ...changes });
export const fields = (record) => Object.keys(record).map((name) => ({ name }));

// NumPy's, of one number: both branches of `where` are computed.
export const where = (test, yes, no) => (truth(test) ? number(yes) : number(no));
export const max = (left, right) => Math.max(number(left), number(right));
export const min = (left, right) => Math.min(number(left), number(right));
export const clip = (value, low, high) => Math.min(Math.max(value, low), high);
export const isin = (value, wanted) => has(wanted, value);

export const float = (value) => number(value);
export const int = (value) => Math.trunc(number(value));
export const largest = (...values) => Math.max(...(values.length > 1 ? values : iter(values[0])));
export const least = (...values) => Math.min(...(values.length > 1 ? values : iter(values[0])));
// Halves go to the even number, as in Python.
export const round = (value) => {
  const below = Math.floor(value);
  return value - below === 0.5 ? below + mod(below, 2) : Math.round(value);
};
export const len = (value) => (value instanceof Map ? value.size : value.length);
export const any = (values) => iter(values).some(truth);
export const all = (values) => iter(values).every(truth);
export const list = (value = []) => [...iter(value)];
export const fromkeys = (keys, value = null) => dict(iter(keys).map((key) => [key, value]));
export const is_int = (value) => typeof value === "number";
export const is_str = (value) => typeof value === "string";

export function sum(values, start = 0) {
  let found = start;
  for (const value of iter(values)) found = add(found, value);
  return found;
}

export const prod = (values) => iter(values).reduce((found, value) => found * value, 1);

export function gcd(...values) {
  return values.reduce((a, b) => {
    while (b) [a, b] = [b, a % b];
    return a;
  }, 0);
}

export const lcm = (...values) =>
  values.reduce((a, b) => (a && b ? (a / gcd(a, b)) * b : 0), 1);

export function range(...ends) {
  const [from, to, step] = ends.length === 1 ? [0, ends[0], 1] : [ends[0], ends[1], ends[2] ?? 1];
  if (!(step > 0)) fail("a range that does not rise");
  const found = [];
  for (let place = from; place < to; place += step) found.push(place);
  return found;
}

export const enumerate = (values, start = 0) => iter(values).map((value, place) => [start + place, value]);
export const zip = (...many) => {
  const all = many.map(iter);
  return range(Math.min(...all.map((one) => one.length))).map((place) => all.map((one) => one[place]));
};
export const reversed = (values) => [...iter(values)].reverse();
export const divmod = (left, right) => [floordiv(left, right), mod(left, right)];

export function accumulate(values, first) {
  const found = [first];
  for (const value of iter(values)) found.push(add(found[found.length - 1], value));
  return found;
}

// What goes first: numbers and words as they are, tuples by their first parts that differ.
function order(left, right) {
  if (Array.isArray(left) && Array.isArray(right)) {
    for (let place = 0; place < Math.min(left.length, right.length); place++) {
      const found = order(left[place], right[place]);
      if (found) return found;
    }
    return left.length - right.length;
  }
  if (typeof left === "string" && typeof right === "string") return left < right ? -1 : Number(left > right);
  return number(left) - number(right);
}

export function sorted(values, key, reverse) {
  const keyed = iter(values).map((value) => [key ? key(value) : value, value]);
  keyed.sort(([left], [right]) => (reverse ? order(right, left) : order(left, right)));
  return keyed.map(([, value]) => value);
}

export const sort = (owner, key, reverse) => void owner.splice(0, owner.length, ...sorted(owner, key, reverse));

// The first of the largest values (sign 1) or of the least (sign -1), by a key.
export function extreme(values, key, otherwise, sign) {
  const of = (value) => (key ? key(value) : value);
  const found = iter(values);
  if (!found.length) return otherwise === undefined ? fail("the largest or least of nothing") : otherwise;
  return found.reduce((best, value) => (sign * order(of(value), of(best)) > 0 ? value : best));
}

export function iterator(values) {
  return iter(values)[Symbol.iterator]();
}

export function next(from, otherwise) {
  if (typeof from.next !== "function") fail("the next of what is no iterator");
  const { done, value } = from.next();
  if (!done) return value;
  return otherwise === undefined ? fail("there is no next") : otherwise;
}

export const first = (values, otherwise) => next(iterator(values), otherwise);

export const items = (owner) => [...owner.entries()];
export const values = (owner) => [...owner.values()];
export const keys = (owner) => [...owner.keys()];
export const get = (owner, key, otherwise = null) => (owner.has(key) ? owner.get(key) : otherwise);
export const append = (owner, value) => void owner.push(value);
export const extend = (owner, values) => void owner.push(...iter(values));
export const insert = (owner, place, value) => void owner.splice(place, 0, value);
export const remove = (owner, value) => void owner.splice(index(owner, value), 1);
export const popleft = (owner) => (owner.length ? owner.shift() : fail("nothing is left"));
export const include = (owner, value) => (owner instanceof Members ? void owner.set(value, true) : fail("add to no set"));
export const upper = (text) => text.toUpperCase();
export const isupper = (text) => text === text.toUpperCase() && text !== text.toLowerCase();
export const ljust = (text, width) => text.padEnd(width);

export function setdefault(owner, key, otherwise) {
  if (!owner.has(key)) owner.set(key, otherwise);
  return owner.get(key);
}

export const startswith = (text, start) => text.startsWith(start);
export const endswith = (text, end) => text.endsWith(end);

export function pop(owner, key, otherwise) {
  if (Array.isArray(owner)) {
    if (key !== undefined) fail("pop of a place");
    return owner.length ? owner.pop() : fail("nothing is left");
  }
  if (otherwise !== undefined && !owner.has(key)) return otherwise;
  const found = item(owner, key);
  spread.delete(owner);
  owner.delete(key);
  return found;
}

export function index(owner, value) {
  const place = owner.findIndex((one) => eq(one, value));
  return place < 0 ? fail(`${value} is not there`) : place;
}

export const count = (owner, value) => owner.filter((one) => eq(one, value)).length;

export const join = (...parts) => parts.join("");
export const joined = (between, values) => iter(values).join(between);
export const repr = (value) => (typeof value === "string" ? `'${value}'` : str(value));

const THOUSANDS = /\B(?=(\d{3})+$)/g;

function commas(text) {
  const [whole, rest] = text.split(".");
  const found = whole.replace(THOUSANDS, ",");
  return rest === undefined ? found : `${found}.${rest}`;
}

export const grouped = (value) => commas(String(value));

// As Python: halfway to the even digit, where a number is truly halfway.
export function fixed(value, digits, group) {
  const size = Math.abs(number(value));
  const shifted = size * 2 ** (digits + 1);
  let near = size;
  if (Number.isInteger(shifted) && shifted % 2 === 1) {
    const below = Math.floor((shifted * 5 ** digits) / 2);
    near = (below % 2 === 0 ? below : below + 1) / 10 ** digits;
  }
  const text = near.toFixed(digits);
  return (value < 0 || Object.is(value, -0) ? "-" : "") + (group ? commas(text) : text);
}

// As `toml_text` of Python: a value as it stands in a run file.
export function toml(value) {
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(value);
  return typeof value === "boolean" ? String(value) : str(value);
}

// What settings of the page never come to: files of schedules, degrees that are left open.
export const unknown = () => fail("the page does not know it");

// As `in_singular` of Python: one of something is not several.
export function singular(pattern, verbs, names, text) {
  return text.replace(new RegExp(pattern, "g"), (...found) => {
    const { before = "", kind, noun, verb } = found[found.length - 1];
    const word = before.replace(/^[( ]+|[( ]+$/g, "");
    if (names.includes(word) || /^\d+$/.test(word)) return found[0];
    const one = noun.slice(0, /(ch|sh|ss)es$/.test(noun) ? -2 : -1);
    return `${before}1 ${kind}${one}` + (verb ? ` ${verbs[verb.trim()]}` : "");
  });
}

export function str(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value) || value?.toString === Object.prototype.toString) fail("a list or a record as text");
  return String(value);
}

// A member of an enumeration is its value.
export const value = (one) => (typeof one === "string" || typeof one === "number" ? one : attribute(one, "value"));
export const member = (members, one) => (has(members, one) ? one : fail(`${one} is no member`));
export const made = (kind, of) => new kind(of);

// As json.dumps: with a blank behind commas and colons.
export function dumps(value) {
  if (Array.isArray(value)) return `[${value.map(dumps).join(", ")}]`;
  if (value instanceof Map) return `{${[...value].map(([name, one]) => `${dumps(name)}: ${dumps(one)}`).join(", ")}}`;
  if (typeof value === "object" && value !== null) fail("a record as JSON");
  const escaped = (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, escaped);
}

// What JSON has as objects, as the Maps that compiled code reads.
export function mapped(value) {
  if (Array.isArray(value)) return value.map(mapped);
  if (value === null || typeof value !== "object") return value;
  return new Map(Object.entries(value).map(([name, one]) => [name, mapped(one)]));
}

// The same of long tables, each record when it is first read.
export function mappedLater(records) {
  const found = new Array(records.length);
  records.forEach((record, place) => {
    const get = () => {
      const value = mapped(record);
      Object.defineProperty(found, place, { value });
      return value;
    };
    Object.defineProperty(found, place, { get, configurable: true });
  });
  return found;
}

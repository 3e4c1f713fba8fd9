// What compiled formulas need of Python and NumPy, of one number each: same values, same errors.
// Python's tuples and lists are arrays here, its dicts are Maps, its None is null.

const fail = (why) => {
  throw new Error(why);
};

const certain = (holds, what) => holds || fail(`not so: ${what}`);
export { certain as assert };

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
  if (left instanceof Map && right instanceof Map) return new Map([...left, ...right]);
  return flags(left, right) ? left || right : bits(number(left), number(right), (a, b) => a | b);
}

export const invert = (value) => (typeof value === "boolean" ? !value : fail("~ of no truth value"));

export function eq(left, right) {
  if (Array.isArray(left) && Array.isArray(right)) {
    return left.length === right.length && left.every((one, place) => eq(one, right[place]));
  }
  const plain = (value) => (typeof value === "boolean" ? Number(value) : value);
  if (left instanceof Map || right instanceof Map) fail("== of dicts");
  if (isRecord(left) && isRecord(right)) {
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

export function unpack(value, count) {
  const found = iter(value);
  return found.length === count ? found : fail(`${found.length} values, not ${count}`);
}

export function item(owner, key) {
  if (owner instanceof Map) return owner.has(key) ? owner.get(key) : fail(`no ${key}`);
  const found = owner[key < 0 ? owner.length + key : Number(key)];
  return found === undefined ? fail(`no place ${key}`) : found;
}

export function setitem(owner, key, value) {
  spread.delete(owner);
  owner.set(key, value);
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
export const len = (value) => (value instanceof Map ? value.size : value.length);
export const any = (values) => iter(values).some(truth);
export const all = (values) => iter(values).every(truth);
export const list = (value) => [...iter(value)];
export const dict = (value) => new Map(value);
export const fromkeys = (keys, value = null) => new Map(iter(keys).map((key) => [key, value]));
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

export const enumerate = (values) => iter(values).map((value, place) => [place, value]);
export const zip = (...many) => {
  const all = many.map(iter);
  return all[0].map((_, place) => all.map((one) => one[place]));
};

export const items = (owner) => [...owner.entries()];
export const values = (owner) => [...owner.values()];
export const keys = (owner) => [...owner.keys()];
export const get = (owner, key, otherwise = null) => (owner.has(key) ? owner.get(key) : otherwise);
export const append = (owner, value) => owner.push(value);
export const startswith = (text, start) => text.startsWith(start);
export const endswith = (text, end) => text.endsWith(end);

export function pop(owner, key) {
  const found = item(owner, key);
  spread.delete(owner);
  owner.delete(key);
  return found;
}

export function index(owner, value) {
  const place = owner.findIndex((one) => eq(one, value));
  return place < 0 ? fail(`${value} is not there`) : place;
}

export const join = (...parts) => parts.join("");
export const joined = (between, values) => iter(values).join(between);
export const repr = (value) => (typeof value === "string" ? `'${value}'` : str(value));
export const upper = (text) => text.toUpperCase();

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

export function str(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (!isRecord(value)) return String(value);
  return value.__str__ ? value.__str__() : fail("a record as text");
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

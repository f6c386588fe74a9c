// The key of this tab. It is kept in sessionStorage, which other programs on 127.0.0.1 never see, unlike a cookie.

const KEY = "edgepipe.key";

/** @param {string} key */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {Record<string, string>} */
export function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

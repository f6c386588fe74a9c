// The key and the session of this tab. They are kept in sessionStorage, which other programs on 127.0.0.1 never see,
// unlike a cookie.

const KEY = "edgepipe.key";
const SESSION = "edgepipe.session"; // of `edgepipe open`: the right to manage
const TICKET = "#ticket=";

/** @param {string} key */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {Record<string, string>} */
export function authorization() {
  const token = sessionStorage.getItem(SESSION) ?? sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export function endSession() {
  sessionStorage.removeItem(SESSION);
}

/**
 * Use the ticket in the page's address, if it has one, and take it out of the address and of the browser's history.
 *
 * @returns {Promise<string>} the problem; empty if there is none
 */
export async function openSession() {
  if (!location.hash.startsWith(TICKET)) return "";
  const ticket = location.hash.slice(TICKET.length);
  history.replaceState(null, "", `${location.pathname}#home`);
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch("/ui/session", { method: "POST", headers, body: JSON.stringify({ ticket }) });
    const found = await answer.json();
    if (!answer.ok) return found.error?.message ?? `the node answered with status ${answer.status}`;
    sessionStorage.setItem(SESSION, found.token);
    return "";
  } catch {
    return "the node does not answer";
  }
}

/** Return whether this tab may manage; an expired session ends. */
export async function mayManage() {
  if (sessionStorage.getItem(SESSION) === null) return false;
  try {
    const answer = await fetch("/ui/session", { headers: authorization(), cache: "no-store" });
    const manages = answer.ok && (await answer.json()).manages;
    if (!manages) endSession();
    return manages;
  } catch {
    return true; // the node is away; it may come back and know the session
  }
}

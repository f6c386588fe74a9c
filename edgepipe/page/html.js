// Elements from templates. Texts become text nodes: nothing that a model or a machine says becomes markup.
import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export const html = htm.bind(h);

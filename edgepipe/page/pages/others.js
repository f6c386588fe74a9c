// The pages behind Home: loaded after its first view, which they would delay.
export { ChatSession } from "../data/chat_session.js";
export { Chat } from "./chat.js";
export { Connect } from "./connect.js";
export { Machines } from "./machines.js";
export { Models } from "./models.js";
export { Requests } from "./requests.js";

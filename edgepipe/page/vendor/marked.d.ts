export interface Token {
  type: string;
  raw: string;
  text?: string;
  tokens?: Token[];
  items?: Token[];
  depth?: number;
  lang?: string;
  href?: string;
  ordered?: boolean;
  start?: number | "";
  task?: boolean;
  checked?: boolean;
  header?: Token[];
  rows?: Token[][];
  align?: (string | null)[];
}
export function lexer(text: string, options?: { gfm?: boolean; breaks?: boolean }): Token[];

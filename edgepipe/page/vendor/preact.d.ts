export type Child = any;
export function h(type: any, props: any, ...children: Child[]): Child;
export function render(child: Child, parent: Element): void;
export const Fragment: any;

import { mount } from "svelte";
import "./page.css";
import App from "./App.svelte";

mount(App, { target: document.getElementById("app") });

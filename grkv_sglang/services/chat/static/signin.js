// Signing in and making an account.

import { call } from "./api.js";
import { byId, showError } from "./dom.js";

let registering = false;

/** Show the form; `signedIn()` is called once somebody is. */
export function showSignIn(session, signedIn) {
  byId("app").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-switch").hidden = !session.registration_open;
  byId("password-hint").textContent = `At least ${session.min_password_characters} characters.`;
  setRegistering(false);
  byId("sign-in-switch").onclick = () => setRegistering(!registering);
  byId("sign-in-form").onsubmit = async (event) => {
    event.preventDefault();
    const submit = byId("sign-in-submit");
    submit.disabled = true;
    showError("sign-in-error", null);
    try {
      await call("POST", registering ? "/register" : "/sign-in", { name: byId("name").value, password: byId("password").value });
      byId("password").value = "";
      byId("sign-in").hidden = true;
      await signedIn();
    } catch (error) {
      showError("sign-in-error", error);
      byId("password").focus();
    } finally {
      submit.disabled = false;
    }
  };
  byId("name").focus();
}

function setRegistering(value) {
  registering = value;
  const words = value ? "Create an account" : "Sign in";
  byId("sign-in-title").textContent = words;
  byId("sign-in-submit").textContent = words;
  byId("sign-in-switch").textContent = value ? "I have an account" : "Create an account";
  byId("password-hint").hidden = !value;
  byId("password").autocomplete = value ? "new-password" : "current-password";
  showError("sign-in-error", null);
}

// SPDX-License-Identifier: Apache-2.0
//! Panics must not unwind through C: a hook's panic is stored here, and resumed after the call that ran the hook.
use std::any::Any;
use std::cell::Cell;
use std::mem;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

thread_local! {
    static PENDING: Cell<Option<Box<dyn Any + Send>>> = Cell::new(None);
}

/// Runs a hook. The first panic of a call is stored, and `fallback` is the hook's result. A stored panic does not end
/// the calls that this hook makes: they did not cause it, and their cleanup runs after their checks.
pub(crate) fn catch<R>(fallback: R, hook: impl FnOnce() -> R) -> R {
    // The cell no longer exists if the thread is ending.
    let before = PENDING.try_with(Cell::take).unwrap_or(None);
    // The hook's captures are `&` to types whose panics the caller observes again, so no broken state goes unnoticed.
    let (result, panic) = match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(result) => (result, None),
        Err(panic) => (fallback, Some(panic)),
    };
    let (mut first, later) = if before.is_some() { (before, panic) } else { (panic, None) };
    let _ = PENDING.try_with(|pending| mem::forget(pending.replace(first.take())));
    mem::forget((first, later)); // dropping them could panic too
    result
}

/// After a call: resumes the panic of a hook, if there was one.
pub(crate) fn resume() {
    if let Ok(Some(panic)) = PENDING.try_with(Cell::take) {
        resume_unwind(panic);
    }
}

/// Makes a call from a destructor, which must not panic: panics of its hooks are dropped here, after their messages
/// were printed. An already pending panic is kept: the destructor may run in a hook of another call.
pub(crate) fn discard(call: impl FnOnce()) {
    let before = PENDING.try_with(Cell::take).unwrap_or(None);
    call();
    let _ = PENDING.try_with(|pending| mem::forget(pending.replace(before)));
}

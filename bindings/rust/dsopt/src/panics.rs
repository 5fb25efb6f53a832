// SPDX-License-Identifier: Apache-2.0
//! Panics must not unwind through C: hooks keep theirs here, and the call that ran the hook goes on with it.
use std::any::Any;
use std::cell::Cell;
use std::mem;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

thread_local! {
    static PENDING: Cell<Option<Box<dyn Any + Send>>> = Cell::new(None);
}

/// Run a hook. The first panic of a call is kept, and `fallback` is the hook's result. A panic that is kept already does
/// not end the calls that this hook makes: they have not seen it, and their own cleanup comes after their checks.
pub(crate) fn catch<R>(fallback: R, hook: impl FnOnce() -> R) -> R {
    // There is no cell any more where the thread is ending already.
    let before = PENDING.try_with(Cell::take).unwrap_or(None);
    // The hook's captures are `&` to types whose panics the caller sees again: nothing broken stays unnoticed.
    let (result, panic) = match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(result) => (result, None),
        Err(panic) => (fallback, Some(panic)),
    };
    let (mut first, later) = if before.is_some() { (before, panic) } else { (panic, None) };
    let _ = PENDING.try_with(|pending| mem::forget(pending.replace(first.take())));
    mem::forget((first, later)); // their drop could panic as well
    result
}

/// After a call: go on with the panic of a hook, if there was one.
pub(crate) fn resume() {
    if let Ok(Some(panic)) = PENDING.try_with(Cell::take) {
        resume_unwind(panic);
    }
}

/// A call from a destructor, which must not panic: what its hooks panic with ends here, and its message has been
/// printed when it began. A panic that is pending already stays: the destructor may run in a hook of another call.
pub(crate) fn discard(call: impl FnOnce()) {
    let before = PENDING.try_with(Cell::take).unwrap_or(None);
    call();
    let _ = PENDING.try_with(|pending| mem::forget(pending.replace(before)));
}

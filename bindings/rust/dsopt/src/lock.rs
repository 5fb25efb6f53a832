// SPDX-License-Identifier: Apache-2.0
use crate::{sys, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

thread_local! {
    static HERE: u8 = const { 0 };
}

/// A mutex that refuses a thread that already holds it: otherwise a hook could deadlock on its own call.
#[derive(Debug, Default)]
pub(crate) struct Lock {
    /// The thread that holds the lock, as an address that is unique per thread. 0: none.
    owner: AtomicUsize,
    mutex: Mutex<()>,
}

pub(crate) struct Guard<'a> {
    lock: &'a Lock,
    _inside: MutexGuard<'a, ()>,
}

impl Lock {
    pub fn enter(&self, what: &str) -> Result<Guard<'_>> {
        let here = HERE.with(|here| here as *const u8 as usize);
        // Only this thread writes its address, so no memory ordering is needed.
        if self.owner.load(Ordering::Relaxed) == here {
            return Err(Error::new(
                sys::DSOPT_ERR_BUSY,
                format!("the {what} is in use by the call that runs this hook"),
            ));
        }
        let inside = self.mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.owner.store(here, Ordering::Relaxed);
        Ok(Guard { lock: self, _inside: inside })
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.lock.owner.store(0, Ordering::Relaxed); // before the mutex is released
    }
}

-- The grants of docs/howto/roles-and-poolers.md, for roles `worker`, `operator` and `gateway` that exist. Run it as the owner of the
-- tables, after every upgrade. Never grant all functions to a worker.

grant usage on schema holdfast to worker;
grant execute on function
    holdfast.hello, holdfast.purge,
    holdfast.sql_version, holdfast.lease_try, holdfast.lease_acquire, holdfast.lease_renew, holdfast.lease_status, holdfast.lease_release, holdfast.lease_abandon,
    holdfast.lease_clear, holdfast.fence_ahead, holdfast.lease_list, holdfast.lease_history, holdfast.lease_protect,
    holdfast.lease_protect_at_commit, holdfast.lease_protect_proven,
    holdfast.owner_hold, holdfast.beat_renew, holdfast.beat_leases, holdfast.beat_release, holdfast.beat_wanted, holdfast.beat_end,
    holdfast.lock_key, holdfast.lock_namespace, holdfast.lock_note, holdfast.lock_holds, holdfast.lock_label,
    holdfast.guard_acquire, holdfast.elector_acquire, holdfast.gate_require, holdfast.gate_trigger,
    holdfast.shard_list, holdfast.slot_claim, holdfast.slot_renew, holdfast.slot_release, holdfast.slot_list, holdfast.slot_abandon,
    holdfast.object_put_if, holdfast.object_swap, holdfast.object_delete_if, holdfast.object_get,
    holdfast.object_get_by_name, holdfast.object_list, holdfast.object_cursor, holdfast.object_changes,
    holdfast.operation_begin, holdfast.operation_acquire, holdfast.operation_claim, holdfast.operation_write, holdfast.operation_finish,
    holdfast.operation_end, holdfast.operation_get, holdfast.operation_look,
    holdfast.operation_list, holdfast.operation_match, holdfast.operation_entries, holdfast.operation_claim_many,
    holdfast.operation_finish_many, holdfast.operation_kin, holdfast.operation_failed,
    holdfast.review_open, holdfast.review_take, holdfast.review_return, holdfast.review_list,
    holdfast.policy_list,
    holdfast.operation_health, holdfast.operation_indexes, holdfast.wal_chains, holdfast.wal_keys, holdfast.wal_latest, holdfast.wal_find,
    holdfast.wal_read, holdfast.relay_acquire, holdfast.relay_read, holdfast.relay_open, holdfast.relay_begin, holdfast.relay_move, holdfast.relay_list,
    holdfast.relay_parked, holdfast.relay_retry,
    holdfast.schedule_register, holdfast.schedule_change, holdfast.schedule_look, holdfast.schedule_advance,
    holdfast.schedule_take, holdfast.schedule_settle, holdfast.schedule_slots,
    holdfast.lease_activity, holdfast.operation_activity, holdfast.schedule_activity
    to worker;

grant execute on function
    holdfast.lease_force_release, holdfast.lease_force_release_if, holdfast.lease_recall, holdfast.lease_wipe,
    holdfast.gate_acquire, holdfast.gate_open, holdfast.gate_close, holdfast.fence_raise,
    holdfast.lock_end_session,
    holdfast.audit_begin, holdfast.audit_note, holdfast.audit_end, holdfast.audit_stands, holdfast.audit_list,
    holdfast.wal_archive, holdfast.operation_expire, holdfast.operation_correct, holdfast.review_decide,
    holdfast.policy_apply,
    holdfast.relay_remove,
    holdfast.schedule_pause, holdfast.schedule_order, holdfast.schedule_remove
    to operator;

grant execute on function holdfast.peer_announce, holdfast.peer_find to gateway;

-- name: examine_journal
select journal_mode as mode from pragma_journal_mode;

-- name: examine_integrity
select quick_check as problem from pragma_quick_check('holdfast_lease') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_beat') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_fence') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_history') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_object') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_object_change') where quick_check <> 'ok';

-- name: examine_fences
select 'fence' as name, (f.last - c.micros) / 1000000.0 as seconds from holdfast_fence f, holdfast_clock c
union all select 'version', (n.place - c.micros) / 1000000.0 from holdfast_object_next n, holdfast_clock c;

-- name: examine_write_lock
-- Takes the write lock, because it is not a select, and writes nothing.
values (1);

delete from holdfast.schema_version where version = 9;
drop function holdfast.schedule_register(jsonb), holdfast.schedule_change(text, bigint, text, text), holdfast.schedule_look(jsonb),
    holdfast.schedule_advance(text, bigint, bigint, jsonb, bigint, int, text), holdfast.schedule_take(text, bigint, text),
    holdfast.schedule_settle(text, bigint, int, text, text, text), holdfast.schedule_slots(text, bigint, boolean, int),
    holdfast.schedule_activity(double precision, integer),
    holdfast.schedule_pause(text, boolean, text, text), holdfast.schedule_order(text, bigint, text, text), holdfast.schedule_remove(text, text, text);
drop function holdfast.schedule_micros(timestamptz);
drop table holdfast.schedule_slot;
drop table holdfast.schedule;

-- Loads a record, with the time. See swap.lua for the format of a record, and for the error code
-- HAPAX.
--
-- KEYS[1]  the record; the reply begins with it, so that a reply to another request is detected
--
-- Most loads find no record: the time is returned as the server's two texts, seconds and microseconds,
-- because numbers cost more than the rest of the script.
local time = redis.call('TIME')
local record = redis.pcall('GET', KEYS[1])
if type(record) == 'table' then
  local code = string.find(record.err, 'WRONGTYPE', 1, true) and 'HAPAX ' or 'NOTREAD '
  return redis.error_reply(code .. record.err)
end
local due = record and tonumber(string.sub(record, 69, 84))
if due and due <= time[1] * 1000000 + time[2] then
  record = false
end
return {KEYS[1], time[1], time[2], record}
